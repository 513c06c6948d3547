"""Products of few rows by the Metal kernels, if their trial passed on this machine; here in the emulator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import counting, needs_emulator
from support.kernels.fake_device import Device
from support.oracles.quantized_products import matrix as random_matrix

from mlxinfer.kernels_metal import executors, kept_trials, kernel_trial
from mlxinfer.kernels_metal.kernel_trial import Speed
from mlxinfer.kernels_metal.quantized_matmul import trial
from mlxinfer.kernels_metal.quantized_matmul.trial import Subject
from mlxinfer.nn import packing, small_batch_matmul
from mlxinfer.nn.linear import Embedding, JoinedLinear, Linear, multiply
from mlxinfer.nn.weights import Blocks, Format, Quantized, concat

BF16, F32 = mx.bfloat16, mx.float32
FORM = Format(4, 64)
FAST = {rows: Speed(1.5) for rows in (1, 2, 4, 8, 16)}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Simulates a Mac whose kernels are faster, and counts launches by kernel."""
    counts: Counter[str] = Counter()

    monkeypatch.setattr(small_batch_matmul, "is_gpu", lambda: True)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(packing, "is_gpu", lambda: True)
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    monkeypatch.setattr(trial, "speeds", lambda subject, seconds: {rows: FAST[rows] for rows in subject.rows})
    with counting(counts):
        yield counts


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of kept trials; the fixture above makes this process's executor look like another's."""
    monkeypatch.setattr(executors, "kind", lambda: "emulator")
    monkeypatch.setattr(kept_trials, "trials_file", lambda: tmp_path / "kernel_trials.json")
    return tmp_path / "kernel_trials.json"


def quantized(n: int = 24, k: int = 128, form: Format = FORM, dtype: mx.Dtype = F32) -> Quantized:
    weight = mx.random.normal((n, k), key=mx.random.key(n)).astype(dtype)
    return Quantized(*mx.quantize(weight, group_size=form.group_size, bits=form.bits), form)


def rows(count: int, k: int = 128, dtype: mx.Dtype = F32) -> mx.array:
    return mx.random.normal((count, k), key=mx.random.key(count)).astype(dtype)


def blocks(kind: str = "Q4_K", n: int = 24, k: int = 512) -> Blocks:
    form = Format(*{"Q4_K": (4, 32), "Q6_K": (6, 16)}[kind], kind)
    return Blocks(random_matrix(kind, n, k, F32).arrays[0], form)


def used(launches: Counter[str], x: mx.array, matrix: Quantized | Blocks) -> bool:
    """True if a product launches a kernel. Asserts that the product is right."""
    before = launches.total()
    found = multiply(x, matrix)
    expected = x.astype(F32) @ matrix.dequantize(F32).T
    np.testing.assert_allclose(found.astype(F32), expected, rtol=0.02, atol=1e-3 * float(mx.abs(expected).max().item()))
    return launches.total() > before


@needs_emulator
def test_two_to_sixteen_rows_go_to_the_kernel(launches: Counter[str]) -> None:
    matrix = quantized()
    assert not used(launches, rows(4), matrix)  # not tried yet
    assert small_batch_matmul.try_format(FORM, F32)
    assert [count for count in (1, 2, 5, 16, 17) if used(launches, rows(count), matrix)] == [2, 5, 16]
    assert used(launches, rows(6).reshape(2, 3, 128), matrix)
    assert not used(launches, rows(4, dtype=BF16), matrix)
    assert not used(launches, rows(4), quantized(form=Format(8, 32)))
    assert small_batch_matmul.TRIAL.described() == [
        "products of few rows, 4-bit affine in groups of 64, float32: this project's kernels; next to MLX's products "
        "1.5x at 2, 1.5x at 4, 1.5x at 8, 1.5x at 16 rows"
    ]


@needs_emulator
def test_a_part_is_tried_when_it_is_settled(launches: Counter[str], kept: Path) -> None:
    linear = Linear(quantized())
    packing.settle(linear, dtype=F32)
    assert used(launches, rows(8), linear.matrix)
    ((kind, entry),) = json.loads(kept.read_text())["trials"]["products of few rows"]["kinds"].items()
    assert "bits=4, group_size=64" in kind
    assert entry == {"speeds": {str(count): [1.5, False, True] for count in (2, 4, 8, 16)}}


@needs_emulator
def test_a_kernel_that_is_slower_or_stalls_is_not_used(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, speeds = quantized(), {2: Speed(0.9), 4: Speed(1.4, stalled=True), 8: Speed(1.1), 16: Speed(2.0)}
    monkeypatch.setattr(trial, "speeds", lambda subject, seconds: speeds)
    small_batch_matmul.try_format(FORM, F32)
    assert [count for count in (2, 3, 7, 9) if used(launches, rows(count), matrix)] == [7, 9]
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    speeds |= {8: Speed(0.5), 16: Speed(0.7)}
    small_batch_matmul.try_format(FORM, F32)
    assert not used(launches, rows(8), matrix)
    assert small_batch_matmul.TRIAL.described()[0].endswith("MLX's products, as the kernel became slower while it ran")


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(**_: Any) -> Callable[..., Any]:
        return lambda *, output_shapes, output_dtypes, **_: [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

    def broken(**_: Any) -> Callable[..., Any]:
        def call(**_: Any) -> list[mx.array]:
            raise RuntimeError("[metal::Device] Unable to build\n metal library")

        return call

    for maker, reason in ((zeros, "products of 2 rows differ"), (broken, "Unable to build metal library")):
        monkeypatch.setattr(small_batch_matmul, "is_gpu", lambda: True)
        monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
        monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
        with executors.run_with(maker):
            verdict = small_batch_matmul.try_format(FORM, F32)
            assert verdict is not None
            assert reason in (verdict.obstacle or "")
            multiply(rows(4), quantized())
            assert small_batch_matmul.block_kinds(F32, ["Q4_K"]) == frozenset()


@needs_emulator
def test_the_switch(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_trial.SWITCH, "0")
    assert small_batch_matmul.try_format(FORM, F32) is None
    assert small_batch_matmul.block_kinds(F32, ["Q4_K"]) == frozenset()
    assert not used(launches, rows(4), quantized())


@needs_emulator
def test_after_a_failure_mlx_computes(launches: Counter[str]) -> None:
    small_batch_matmul.try_format(FORM, F32)
    assert small_batch_matmul.block_kinds(F32, ["Q4_K", "F16"]) == {"Q4_K"}
    assert small_batch_matmul.TRIAL.lost() == []
    error = RuntimeError("[METAL] Command buffer execution failed\n test")
    assert not small_batch_matmul.TRIAL.disable(error, guilty=True)  # all of them pass their trial again
    assert used(launches, rows(4), quantized())
    assert small_batch_matmul.TRIAL.disable(error, guilty=False)
    assert not small_batch_matmul.TRIAL.disable(error, guilty=False)
    assert not used(launches, rows(4), quantized())
    assert not used(launches, rows(4, 512), blocks())
    assert all(
        "a Metal kernel failed: [METAL] Command buffer execution failed test" in line for line in small_batch_matmul.TRIAL.described()
    )
    assert small_batch_matmul.TRIAL.lost()[0].startswith(
        "products of few rows, 4-bit affine in groups of 64, float32: MLX's products, as a Metal kernel"
    )


@needs_emulator
def test_only_the_guilty_format_is_given_up(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (FORM, Format(8, 32)):
        small_batch_matmul.try_format(form, F32)
    monkeypatch.setattr(trial, "wrong_products", lambda subject: "wrong" if subject.bits == 8 else None)
    assert kernel_trial.disable(ValueError("Thread group size"), guilty=True)
    assert any("8-bit affine" in line for line in kernel_trial.lost_lines())
    assert used(launches, rows(4), quantized())
    assert not used(launches, rows(4), quantized(form=Format(8, 32)))


@needs_emulator
def test_blocks(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = blocks("Q6_K", n=40)
    assert not used(launches, rows(3, 512), matrix)
    assert small_batch_matmul.block_kinds(F32, ["Q6_K"]) == {"Q6_K"}
    assert used(launches, rows(1, 512), matrix)
    assert used(launches, rows(40, 512), matrix)
    assert launches["block_dequantize"] == 1  # of the trial
    tokens = mx.array([[7, 0], [39, 7]])
    assert mx.array_equal(Embedding(matrix, F32)(tokens), matrix.dequantize(F32)[tokens])
    assert launches["block_dequantize"] == 2
    monkeypatch.setattr(small_batch_matmul, "UNPACKED_BYTES", 1)
    assert used(launches, rows(60, 512), matrix)
    assert launches["block_dequantize"] == 2 + 3


def test_blocks_are_matrices_like_others() -> None:
    first, second = blocks(n=8), blocks(n=24)
    joined = JoinedLinear([Linear(first), Linear(second)], [8, 24])
    assert len(joined.linears) == 1
    x = rows(3, 512)
    for found, part in zip(joined(x), (first, second), strict=True):
        np.testing.assert_allclose(found, x @ part.dequantize(F32).T, atol=1e-3)
    table = Embedding(second, BF16)
    assert mx.array_equal(table(mx.array([3, 0, 3])), second.dequantize(BF16)[mx.array([3, 0, 3])])
    assert table.as_linear(x).shape == (3, 24)
    with pytest.raises(ValueError, match="different quantization"):
        concat([first, blocks("Q6_K")])


@needs_emulator
def test_what_was_measured_is_not_measured_again(launches: Counter[str], monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    small_batch_matmul.try_format(FORM, F32)
    launches.clear()
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    monkeypatch.setattr(trial, "speeds", None)
    verdict = small_batch_matmul.try_format(FORM, F32)
    assert verdict is not None
    assert set(verdict.speeds) == {2, 4, 8, 16}
    assert not launches


@needs_emulator
def test_the_doctor_measures_for_longer_and_again(launches: Counter[str], monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    asked = []
    small_batch_matmul.try_format(FORM, BF16)

    def stalls(subject: Subject, seconds: float) -> dict[int, Speed]:
        asked.append((subject.shape, seconds))
        return {count: Speed(3.0, stalled=True) for count in subject.rows}

    monkeypatch.setattr(trial, "speeds", stalls)
    lines = small_batch_matmul.product_status(BF16)
    assert len(lines) == 2
    assert all("as the kernel became slower while it ran" in line for line in lines)
    assert asked == [("", 2.0), ("wide", 2.0)]
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    verdict = small_batch_matmul.try_format(FORM, BF16)  # a later load knows
    assert verdict is not None
    assert not verdict.speeds
    assert small_batch_matmul.TRIAL.lost()


def measured(monkeypatch: pytest.MonkeyPatch, ours: Callable[[float], float], host: float = 0.0) -> tuple[dict[int, Speed], float]:
    """Measure with products of 1 ms for MLX and `ours(time)` for the kernels, which also take `host` seconds to build. Return the speeds
    and the duration."""
    device = Device()
    monkeypatch.setattr(trial, "_products", lambda *_: (device.product(ours, host), device.product(lambda _: 0.001, 0.0)))
    monkeypatch.setattr(mx, "eval", device.eval)
    return trial.speeds(Subject("affine", 4, 64, BF16), 0.2, clock=device.clock, width=256, most_bytes=1 << 15), device.now


def test_speeds_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    found, took = measured(monkeypatch, lambda _: 0.0005)
    assert {count: round(speed.times_mlx, 3) for count, speed in found.items()} == {2: 2.0, 4: 2.0, 8: 2.0, 16: 2.0}
    assert not any(speed.stalled for speed in found.values())
    assert took < 0.25


def test_building_graphs_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's next step is built while the device computes the previous one."""
    found, _ = measured(monkeypatch, lambda _: 0.0005, host=0.01)
    assert {round(speed.times_mlx, 3) for speed in found.values()} == {2.0}
    assert {round(speed.seconds, 6) for speed in found.values()} == {0.0005}


def test_a_stall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, lambda now: 0.0004 if now < 0.02 else 0.001)
    assert found[2].stalled
    assert not found[16].stalled
