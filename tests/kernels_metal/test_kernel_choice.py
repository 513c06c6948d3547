"""Kernels that MLX's operations can replace are chosen by speed on a GPU, and by their trial alone elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.kernels.fake_device import Device, pretend_to_measure

from mlxinfer.kernels_metal import executors, kept_trials, kernel_speed, kernel_trial
from mlxinfer.kernels_metal.kernel_speed import compare
from mlxinfer.kernels_metal.kernel_trial import KernelTrial, Kind, Speed
from mlxinfer.nn import residual_stream, routes
from mlxinfer.nn.routes import softmax_then_top
from mlxinfer.sampling import top_k_top_p

MS = 1e-3
CASES: dict[str, tuple[ModuleType, str, Kind]] = {
    "sums with norms": (residual_stream, "add_norm", (mx.float32, 64, False, True)),
    "sums of normed results": (residual_stream, "add_norm", (mx.bfloat16, 64, True, False)),
    "sums with a bias": (residual_stream, "add_norm", (mx.float32, 64, False, True, True)),
    "choices of experts": (routes, "choose_experts", softmax_then_top(2, normalized=True).kind(mx.float32, 24)),
    "top-k and top-p": (top_k_top_p, "threshold", (1024,)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, str, Kind]:
    module, name, kind = CASES[request.param]
    monkeypatch.setattr(module.TRIAL, "verdicts", {})
    return module, name, kind


@pytest.fixture
def passes(case: tuple[ModuleType, str, Kind], monkeypatch: pytest.MonkeyPatch) -> KernelTrial:
    """The trial of the case, whose kernel passes."""
    trial: KernelTrial = case[0].TRIAL
    monkeypatch.setattr(trial, "_check", lambda *kind: None)
    return trial


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(executors, "kind", lambda: "Metal")
    monkeypatch.setattr(kept_trials, "trials_file", lambda: tmp_path / "kernel_trials.json")
    return tmp_path / "kernel_trials.json"


def on_device(case: tuple[ModuleType, str, Kind], monkeypatch: pytest.MonkeyPatch, kernel: float, mlx: float) -> Device:
    """Return a device on which the kernel of the case and MLX's operations take these times."""
    module, name, _ = case
    device, plain = pretend_to_measure(monkeypatch), getattr(module.reference, name)

    def answer(*arguments: Any, **named: Any) -> Any:
        return arguments[0][:, :1] if name == "threshold" else plain(*arguments, **named)

    monkeypatch.setattr(module.launcher, name, device.takes(kernel, answer))
    monkeypatch.setattr(module.reference, name, device.takes(mlx, answer))
    return device


@pytest.mark.parametrize(("kernel", "used"), [(0.5, True), (1.0, True), (1.02, True), (1.05, False), (2.0, False)])
def test_a_kernel_is_used_unless_it_is_slower(
    kernel: float, used: bool, case: tuple[ModuleType, str, Kind], passes: KernelTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(case, monkeypatch, kernel * MS, MS)
    assert (passes.obstacle(*case[2]) is None) == used
    (line,) = passes.described()
    assert line.endswith(
        f"kernel, {1 / kernel:.3g}x plain MLX" if used else f"plain MLX instead: the kernel has only {1 / kernel:.3g}x its speed"
    )
    assert passes.lost() == passes.lines([case[2]]) == []  # to be faster than the kernel is no loss


def test_a_choice_is_read_by_the_next_process_and_lasts(
    case: tuple[ModuleType, str, Kind], passes: KernelTrial, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Until it is clearly wrong, in a measurement on request."""

    def chosen(kernel: float, mlx: float = 1.0, *, again: bool) -> tuple[bool, int]:
        monkeypatch.setattr(passes, "verdicts", {})
        with monkeypatch.context() as changed:
            device = on_device(case, changed, kernel * MS, mlx * MS)
            return passes.try_now(*case[2], again=again).obstacle is None, device.evaluations

    used, evaluations = chosen(1.05, again=False)
    assert not used
    assert evaluations > 0
    assert chosen(0.5, again=False) == (False, 0)
    assert [chosen(kernel, again=True)[0] for kernel in (1.04, 1.02, 1.05, 1.08, 1.12, 1.05, 1.0)] == [
        False,
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    assert chosen(3.0, again=False) == (True, 0)


@pytest.mark.parametrize("change", ["machine", "source"])
def test_a_choice_is_measured_anew_elsewhere(
    change: str, case: tuple[ModuleType, str, Kind], passes: KernelTrial, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    on_device(case, monkeypatch, MS, 2 * MS)
    assert passes.obstacle(*case[2]) is None
    on_device(case, monkeypatch, 2 * MS, MS)
    if change == "machine":
        monkeypatch.setattr(kept_trials, "_machine", lambda executor: "Apple M9, Darwin 27.0, mlx 1.0")
    else:
        monkeypatch.setattr(kept_trials, "_digest_of_trial", lambda check: "another")
    monkeypatch.setattr(passes, "verdicts", {})
    assert passes.obstacle(*case[2]) is not None


def test_nothing_is_measured_without_a_gpu(
    case: tuple[ModuleType, str, Kind], passes: KernelTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = on_device(case, monkeypatch, 2 * MS, MS)
    monkeypatch.setattr(executors, "measurable", lambda: False)
    assert passes.obstacle(*case[2]) is None
    assert device.evaluations == 0
    assert passes.described()[0].endswith("this project's kernel")


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU, for which tests switch it off")
def test_only_a_gpu_is_measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    for executor, found in (("Metal", True), ("CUDA", True), ("emulator", False), ("", False)):
        monkeypatch.setattr(executors, "kind", lambda executor=executor: executor)
        assert executors.measurable() is found


@needs_emulator
def test_what_is_measured_can_run(case: tuple[ModuleType, str, Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(kernel_speed, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(kernel_speed, "_BUSY_NUMBERS", 1 << 10)
    with emulated():
        assert case[0]._speeds(*case[2]) == {1: Speed(1.0, seconds=1.0)}


def test_a_fault_while_it_is_measured_is_an_obstacle(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    def fails(kind: str) -> dict[int, Speed]:
        raise RuntimeError("[METAL] Command buffer\nexecution failed")

    monkeypatch.setattr(kernel_trial, "TRIALS", [])
    trial = KernelTrial("sums", lambda kind: None, speeds=fails)
    assert trial.obstacle("a") == "its speed could not be measured: [METAL] Command buffer execution failed"
    assert trial.lost()
    assert not file.exists()


def busy_steps(device: Device, ours: float, theirs: float) -> tuple[Callable[..., mx.array], Callable[..., mx.array]]:
    return device.product(lambda _: ours, 0.0), device.product(lambda _: theirs, 0.0)


def test_products_keep_the_device_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """For about 60 us a step, if one pair takes 25 us: three of them."""
    device, counted = pretend_to_measure(monkeypatch), []
    monkeypatch.setattr(kernel_speed, "_BUSY_NUMBERS", 64)
    product = mx.array.__matmul__

    def multiply(x: mx.array, other: mx.array) -> mx.array:
        device.waiting += 12.5e-6
        counted.append(other.shape)
        return product(x, other)

    monkeypatch.setattr(mx.array, "__matmul__", multiply)
    x = mx.zeros((2, 8))
    speed = compare(*busy_steps(device, 10e-6, 20e-6), x, busy=True, seconds=0.01)
    assert {*counted} == {(16, 4), (4, 16)}
    assert speed.seconds == pytest.approx(85e-6)
    assert speed.times_mlx == pytest.approx(95 / 85)
