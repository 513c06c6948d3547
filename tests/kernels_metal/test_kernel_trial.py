"""The registry of kernels that plain MLX can replace."""

from __future__ import annotations

from threading import Event, Timer

import mlx.core as mx
import pytest

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.kernel_trial import KernelTrial, Verdict, difference

FAULT = RuntimeError("[METAL] Command buffer\nexecution failed")


class Check:
    """A check of kinds by name: the listed ones fail."""

    def __init__(self) -> None:
        self.faults: dict[str, str | Exception] = {}
        self.calls: list[str] = []

    def __call__(self, kind: str) -> str | None:
        self.calls.append(kind)
        fault = self.faults.get(kind)
        if isinstance(fault, Exception):
            raise fault
        return fault


@pytest.fixture
def check() -> Check:
    return Check()


@pytest.fixture
def trial(check: Check, monkeypatch: pytest.MonkeyPatch) -> KernelTrial:
    monkeypatch.setattr(kernel_trial, "TRIALS", [])
    return KernelTrial("sums", check)


def test_a_kind_is_tried_once(trial: KernelTrial, check: Check) -> None:
    assert [trial.obstacle(kind) for kind in ("a", "b", "a")] == [None] * 3
    assert check.calls == ["a", "b"]
    assert kernel_trial.lost_lines() == []
    trial.forget()
    assert trial.obstacle("a") is None
    assert check.calls == ["a", "b", "a"]


def test_faults_and_errors_are_obstacles(trial: KernelTrial, check: Check) -> None:
    check.faults = {"wrong": "zeros", "crash": FAULT, "shape": UnsupportedShapeError("heads of 64 only"), "bug": ZeroDivisionError()}
    assert trial.obstacle("wrong") == "a Metal kernel failed its trial: zeros"
    assert trial.obstacle("crash") == "a Metal kernel failed its trial: [METAL] Command buffer execution failed"
    assert trial.obstacle("shape") == "heads of 64 only"
    with pytest.raises(ZeroDivisionError):
        trial.obstacle("bug")
    assert trial.lines([("shape",), ("fine",)]) == ["sums: plain MLX instead: heads of 64 only"]


def test_only_guilty_kinds_are_disabled(trial: KernelTrial, check: Check) -> None:
    assert not kernel_trial.disable(FAULT, guilty=True)
    trial.lines([("a",), ("b",)])
    assert not kernel_trial.disable(FAULT, guilty=True)
    check.faults, before = {"a": "zeros"}, kernel_trial.age()
    assert kernel_trial.disable(FAULT, guilty=True)
    assert kernel_trial.age() > before
    assert trial.obstacle("a") == "a Metal kernel failed: [METAL] Command buffer execution failed"
    assert trial.obstacle("b") is None


def test_all_kinds_in_use_are_disabled_together(trial: KernelTrial, check: Check) -> None:
    check.faults = {"c": "zeros"}
    trial.lines([("a",), ("b",), ("c",)])
    assert kernel_trial.disable(FAULT, guilty=False)
    assert not kernel_trial.disable(FAULT, guilty=False)
    assert kernel_trial.lost_lines() == [
        "sums: plain MLX instead: a Metal kernel failed its trial: zeros",
        "sums: plain MLX instead: a Metal kernel failed: [METAL] Command buffer execution failed",
    ]
    assert check.calls == ["a", "b", "c"]


def test_a_kernel_that_is_not_listed_is_disabled_by_kind(trial: KernelTrial, check: Check) -> None:
    other = KernelTrial("attention", check, failure="the kernels failed their trial", listed=False)
    other.lines([("a",), ("b",)])
    assert not kernel_trial.disable(FAULT, guilty=False)
    assert not other.disable(FAULT, guilty=True, kinds=[("a",)])
    assert other.disable(FAULT, guilty=False, kinds=[("a",)])
    assert other.obstacle("a") is not None
    assert other.obstacle("b") is None
    check.faults = {"c": "zeros"}
    assert other.obstacle("c") == "the kernels failed their trial: zeros"
    other.verdicts["d",] = Verdict("MLX is faster", quiet=True)
    assert len(other.lost()) == 2
    assert len(other.described()) == 4
    assert kernel_trial.lost_lines() == []


def test_differences_are_relative_to_the_largest_number() -> None:
    right = mx.array([100.0, 1.0, 0.0])
    assert difference(right + 0.9, right, 0.01) is None
    assert difference(right + 2, right, 0.01) == "differ from plain MLX by 0.02 of the largest"
    assert difference(right + 0.9, right, 0.01, 0.005) is not None
    assert difference(right.astype(mx.bfloat16) + 0.5, right, 0.01, 0.01) is None
    assert difference(right * float("nan"), right, 0.01) is not None


def test_a_compilers_first_error_is_told_and_its_whole_text_kept(trial: KernelTrial, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's compiler prints warnings and errors in the order of the source."""
    monkeypatch.setattr(kernel_trial, "_ERRORS", [])
    warnings = "".join(f"program_source:{line}:9: warning: unused variable 'x{line}'\n{'x' * 400}\n" for line in range(10))
    text = f"[metal::Device] Unable to build metal library from source\n{warnings}program_source:97:3: error: no matching constructor"
    check.faults["a"] = RuntimeError(text + "\n12 warnings and 1 error generated.")
    obstacle = trial.obstacle("a")
    assert obstacle is not None
    assert obstacle.endswith("program_source:97:3: error: no matching constructor")
    ((kernel, whole),) = kernel_trial.failed_trials()
    assert kernel == "sums ('a',)"
    assert whole.startswith(text)
    check.faults["b"] = RuntimeError("gone")
    assert trial.obstacle("b") == "a Metal kernel failed its trial: gone"
    from mlxinfer.cli.health.report import _kernel_errors

    first, second = _kernel_errors()
    assert "12 warnings and 1 error generated." in first
    assert second == "sums ('b',):\n\n  ```\n  gone\n  ```"


@pytest.fixture
def notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that has told nothing yet."""
    monkeypatch.setattr(kernel_trial, "_NOTICE", kernel_trial._Notice())


def test_slow_trials_are_told_once(monkeypatch: pytest.MonkeyPatch, notice: None) -> None:
    told = Event()
    lines: list[str] = []

    def tell() -> None:
        lines.append("compiling")
        told.set()

    def slow(kind: str) -> str | None:
        return None if told.wait(60) else "nobody was told"

    monkeypatch.setattr(kernel_trial, "TRIALS", [])
    monkeypatch.setattr(kernel_trial, "_SLOW_SECONDS", 0.0)
    trial = KernelTrial("sums", slow)
    with kernel_trial.slow_trials_told(tell):
        assert [trial.obstacle(kind) for kind in "ab"] == [None, None]
    with kernel_trial.slow_trials_told(tell):
        assert trial.obstacle("c") is None
    assert lines == ["compiling"]


def test_quick_trials_are_not_told(trial: KernelTrial, monkeypatch: pytest.MonkeyPatch, notice: None) -> None:
    """The timer of each trial has what is left of the second."""
    made: list[float] = []

    class Clock:
        now = 0.0

    class Stopped(Timer):
        def start(self) -> None:
            made.append(self.interval)

    monkeypatch.setattr(kernel_trial, "Timer", Stopped)
    monkeypatch.setattr(kernel_trial, "monotonic", lambda: Clock.now)

    def check(kind: str) -> None:
        Clock.now += 0.75

    slow = KernelTrial("sums", check)
    slow.obstacle("nobody listens")
    with kernel_trial.slow_trials_told(lambda: None):
        for kind in "abc":
            slow.obstacle(kind)
    assert made == [1.0, 0.25, 0.0]
