"""The choice of an instruction set: of those that a build has, the best that the processor and `MLXINFER_CPU_ISA` allow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import native

SOURCES = Path(__file__).parents[2] / "kernels_cpu" / "src"
PROGRAM = """
#include "dispatch/isa.cpp"
#include <cstdio>
#include <initializer_list>
using namespace mlxinfer::cpu;
int main() {
  std::printf("%s,%s", machine_isa(), isa_name());
  for (Level each : {Level::lowest, Level::middle, Level::highest}) std::printf(",%s", name_of(each));
}
"""
ALL = 7

Chosen = Callable[..., list[str]]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    """The machine's set, the chosen one and all three names, with the sets of `compiled` (a bit each) and `MLXINFER_CPU_ISA`."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("isa")
    (folder / "main.cpp").write_text(PROGRAM)

    def run(compiled: int, wanted: str | None = None) -> list[str]:
        program = folder / f"isas{compiled}"
        if not program.exists():
            defined = [f"-DMLXINFER_COMPILED={compiled}", "-DMLXINFER_TABLES=a,b,c", "-std=c++20", f"-I{SOURCES}"]
            subprocess.run([compiler, *defined, str(folder / "main.cpp"), "-o", str(program)], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "MLXINFER_CPU_ISA"}
        environment |= {"MLXINFER_CPU_ISA": wanted} if wanted else {}
        return subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout.split(",")

    return run


def test_the_best_of_the_machine_is_chosen(chosen: Chosen) -> None:
    machine, isa, *names = chosen(ALL)
    assert isa == machine in names


@pytest.mark.parametrize("compiled", [1, 3, 4, 5, 7])
def test_a_build_without_sets_takes_the_next_lower_one_or_none(chosen: Chosen, compiled: int) -> None:
    """`MLXINFER_CPU_ISA` lowers what is allowed as an older processor does."""
    machine, _, *names = chosen(ALL)
    if len(set(names)) == 1:
        pytest.skip("this architecture has one set")
    for wanted in names[: names.index(machine) + 1]:
        allowed = [name for bit, name in enumerate(names) if compiled >> bit & 1 and bit <= names.index(wanted)]
        assert chosen(compiled, wanted)[1] == (allowed or [""])[-1]


def test_an_unknown_name_changes_nothing(chosen: Chosen) -> None:
    assert chosen(ALL, "sse9")[1] == chosen(ALL)[0]


def _module(isa: str, machine: str, *compiled: str) -> SimpleNamespace:
    return SimpleNamespace(isa_name=lambda: isa, machine_isa=lambda: machine, compiled_isas=lambda: list(compiled), thread_count=lambda: 2)


def test_a_module_of_a_better_processor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = native._no_isa(_module("", "avx2", "avx512"))  # type: ignore[arg-type]
    assert problem.startswith("compiled for avx512, which this processor lacks (it has avx2); rebuild it: pip install")
    monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(None, problem))
    assert kernels_cpu.missing_lines() == [kernels_cpu.status()]
    assert "\n" not in kernels_cpu.status()


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (_module("avx512", "avx512", "avx512"), "CPU kernels: avx512 (the only instruction set compiled), 2 threads"),
        (_module("avx2", "avx2", "portable", "avx2", "avx512"), "CPU kernels: avx2 (compiled: portable, avx2, avx512), 2 threads"),
        (
            _module("avx2", "avx512", "avx2"),
            "CPU kernels: avx2 (the only instruction set compiled; this processor has avx512, which is faster",
        ),
    ],
)
def test_doctor_says_which_sets_are_compiled(monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace, told: str) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(module))  # type: ignore[arg-type]
    monkeypatch.setattr(native, "native", module)
    assert kernels_cpu.status().startswith(told)


@pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())
def test_a_set_that_was_not_compiled_is_no_illegal_instruction() -> None:
    """Each set below the machine's is used where it was compiled; otherwise products run without the kernels, and one line says why."""
    script = "from mlxinfer import kernels_cpu as k; print(k.available() and k.isa_name()); print(*k.missing_lines(), sep='\\n')"
    compiled = native.native.compiled_isas()
    for wanted in ("portable", native.native.machine_isa()):
        environment = os.environ | {"MLXINFER_CPU_ISA": wanted}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        used, lines = done.stdout.split("\n", 1)
        if wanted in compiled:
            assert (used, lines.strip()) == (wanted, "")
        else:
            assert used == "False"
            assert lines.count("CPU kernels: compiled for ") == 1
            assert f"only, not for MLXINFER_CPU_ISA={wanted}; MLXINFER_ALL_ISAS=1 pip install" in lines


@pytest.mark.parametrize("problem", [native._OFF, native._NOT_BUILT, None])
def test_kernels_that_nobody_wants_are_no_note(monkeypatch: pytest.MonkeyPatch, problem: str | None) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(None, problem))
    assert kernels_cpu.missing_lines() == []
