"""Order and conditions of the whole suite: quick tests first; what this machine lacks is skipped, and listed in the last line."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Where tests run in several processes, each computes in one thread: read when the libraries are imported. Results that must not depend on
# the number of threads are compared in processes of their own.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    for _variable in ("MLXINFER_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(_variable, "1")
# The matrix units of some GPUs round float32 otherwise, and references are exact.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# The terminal in which the tests were started, which is not the one in which a test starts something.
for _variable in ("LINES", "COLUMNS"):
    os.environ.pop(_variable, None)

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from support import exact
from support.processes.short_paths import short_directory

from mlxinfer import kernels_cpu
from mlxinfer.kernels_metal import emulator, executors, kept_trials

# The same examples in every run, and no judgement of how long one takes: machines are slow and shared.
_REPEATABLE: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("full", **_REPEATABLE)
settings.register_profile("repeatable", max_examples=34, **_REPEATABLE)
settings.register_profile("quick", max_examples=25, **_REPEATABLE)
settings.register_profile("smoke", max_examples=5, **_REPEATABLE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Nothing is written beside what the user has; tests of packed copies switch them on, in a directory of their own.
os.environ["MLXINFER_PACKED_GB"] = "0"

# Trials of kernels are made in each process, and none is kept beside those of the user.
kept_trials.trials_file = lambda: None

# Every kernel that passes its trial is tested, also where MLX's operations are faster.
if mx.metal.is_available() or mx.cuda.is_available():
    executors.measurable = lambda: False

# What MLX fuses for a CPU, it has a C++ compiler make a library of, which takes seconds each; without, the same is computed step by step.
if not mx.metal.is_available():
    mx.disable_compile()

# A shell's background jobs ignore Ctrl-C, and those of nohup a hang-up: so would every process that a test starts and sends one to. With
# a handler, the tests themselves outlive a hang-up, and what they start has the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(exact):
        config.pluginmanager.register(exact, "support.exact")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests are a large heap, which stays: it is not searched for garbage, neither while it is made nor afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Like `tmp_path`, for what is named by a path that has to be short."""
    with short_directory() as path:
        yield path


def _missing(marker: str) -> str | None:
    """Why the tests with a marker cannot run here."""
    if marker == "metal":
        return None if mx.metal.is_available() else "no Apple GPU"
    if marker == "torch":
        installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
        return None if installed else "torch or transformers is not installed (make torch)"
    if marker == "model":
        fast = mx.metal.is_available() or kernels_cpu.in_use() or os.environ.get("MLXINFER_TEST_MODELS") == "1"
        return None if fast else "thirty times slower without a GPU or the CPU kernels (MLXINFER_TEST_MODELS=1 runs real models)"
    # Where there is a GPU, tests of kernels run on it, and what needs the emulator finds out (`emulated`).
    return None if mx.metal.is_available() or mx.cuda.is_available() else emulator.why_not()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.option.markexpr:  # -m slow
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    for marker in ("metal", "model", "torch", "emulator"):
        marked = [item for item in items if (found := item.get_closest_marker(marker)) and found.kwargs.get("computes", True)]
        reason = _missing(marker) if marked else None
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=_late)


def _late(item: pytest.Item) -> tuple[int, bool, bool]:
    """Those with torch stand together, and those with LiteLLM: each process that runs one of them imports it, which takes five seconds."""
    late = [item.get_closest_marker(name) is not None for name in ("long", "model", "torch")]
    return sum(late), late[-1], "litellm" in item.name


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """The emulator needs a compiler for each of its sanitizers; a test of one that cannot be had is skipped."""
    try:
        return (yield)
    except emulator.Unavailable as lack:
        if pyfuncitem.get_closest_marker("emulator"):
            pytest.skip(str(lack))
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """After all that pytest has to say."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if skipped:
        reporter.write_line(_list_of_skipped(skipped))
    return result


def _list_of_skipped(reports: list[pytest.TestReport | pytest.CollectReport]) -> str:
    """One line: how many for which reason."""
    counts: Counter[str] = Counter()
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        words = " ".join(reason.removeprefix("Skipped: ").split())
        counts[f"whole module: {words}" if isinstance(report, pytest.CollectReport) else words] += 1
    return "skipped: " + " | ".join(f"{count} {reason}" for reason, count in counts.most_common())
