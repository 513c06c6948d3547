"""Products of one row on a GPU: this project's kernel if a trial of the matrix's class of shapes favours it; here in the emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import counting, emulated, needs_emulator

from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.kernel_trial import Speed
from mlxinfer.kernels_metal.quantized_matmul import trial
from mlxinfer.kernels_metal.quantized_matmul.launcher import ROW_WIDTHS, row_class
from mlxinfer.kernels_metal.quantized_matmul.trial import Subject
from mlxinfer.nn import packing, small_batch_matmul
from mlxinfer.nn.linear import Linear, multiply
from mlxinfer.nn.weights import Format, Quantized

F32 = mx.float32
FORM = Format(4, 64)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Simulates a Mac whose kernel of one row is faster for some classes of shapes, and counts launches by kernel."""
    counts: Counter[str] = Counter()

    for module in (small_batch_matmul, packing):
        monkeypatch.setattr(module, "is_gpu", lambda: True)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    monkeypatch.setattr(small_batch_matmul, "_LEAST_NUMBERS", 0)
    speeds = {"": 0.9, "wide": 0.9, "wide uneven": 1.3, "narrow": 1.4, "narrow uneven": 1.2}
    monkeypatch.setattr(trial, "speeds", lambda subject, seconds: dict.fromkeys(subject.rows, Speed(speeds[subject.shape])))
    with counting(counts):
        yield counts


def linear(n: int, k: int) -> Linear:
    weight = mx.random.normal((n, k), key=mx.random.key(n))
    return Linear(Quantized(*mx.quantize(weight, group_size=64, bits=4), FORM))


@needs_emulator
def test_a_matrix_uses_what_is_faster_in_its_class(launches: Counter[str]) -> None:
    parts = [linear(*shape) for shape in ((24, 512), (2048, 512), (2049, 512), (24, 576))]
    for part in parts:
        packing.settle(part, dtype=F32)
    launches.clear()
    before, found = 0, []
    for part in parts:
        x = mx.random.normal((1, part.matrix.shape[1]), key=mx.random.key(7))
        expected = x @ part.matrix.dequantize(F32).T  # type: ignore[union-attr]
        np.testing.assert_allclose(multiply(x, part.matrix), expected, rtol=0.02, atol=1e-3 * float(mx.abs(expected).max().item()))
        found.append(launches["affine_vector"] - before)
        before = launches["affine_vector"]
    assert found == [1, 0, 1, 1]
    assert set(launches) == {"affine_vector"}
    lines = small_batch_matmul.TRIAL.described()
    assert [line.partition("float32, ")[2] for line in lines if "matrices" in line] == [
        "narrow matrices: this project's kernels; next to MLX's products 1.4x at 1 row",
        "narrow uneven matrices: this project's kernels; next to MLX's products 1.2x at 1 row",
        "wide matrices: MLX's products, as the kernel has only 0.9x its speed",
        "wide uneven matrices: this project's kernels; next to MLX's products 1.3x at 1 row",
    ]


@needs_emulator
def test_several_rows_are_chosen_apart(launches: Counter[str]) -> None:
    part = linear(24, 512)
    packing.settle(part, dtype=F32)
    launches.clear()
    for shape in ((1, 512), (1, 1, 512), (2, 512), (0, 512)):
        multiply(mx.ones(shape), part.matrix)
    assert launches == {"affine_vector": 2}  # MLX is faster for several rows


@needs_emulator
def test_small_matrices_are_not_tried(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_matmul, "_LEAST_NUMBERS", 24 * 512 + 1)
    part = linear(24, 512)
    packing.settle(part, dtype=F32)
    assert launches["affine_vector"] == 0
    multiply(mx.ones((1, 512)), part.matrix)
    assert launches["affine_vector"] == 0
    assert not any("matrices" in line for line in small_batch_matmul.TRIAL.described())


@needs_emulator
def test_after_a_failure_mlx_multiplies(launches: Counter[str]) -> None:
    part = linear(24, 512)
    packing.settle(part, dtype=F32)
    assert small_batch_matmul.TRIAL.disable(RuntimeError("[METAL] failed"), guilty=False)
    launches.clear()
    multiply(mx.ones((1, 512)), part.matrix)
    assert not launches
    assert any("narrow matrices: MLX's products, as a Metal kernel failed" in line for line in small_batch_matmul.TRIAL.lost())


@needs_emulator
@pytest.mark.parametrize("shape", ["wide", "narrow uneven"])
def test_the_trial_finds_what_is_right_and_times_it(shape: str) -> None:
    with emulated():
        for subject in (Subject("affine", 4, 64, mx.bfloat16, shape=shape), Subject("affine", 8, 128, mx.float16, shape=shape)):
            assert trial.wrong_products(subject) is None
        found = trial.speeds(Subject("mxfp4", 4, 32, mx.bfloat16, shape=shape), 0.001, width=256, most_bytes=1 << 16)
    assert set(found) == {1}
    assert found[1].seconds > 0


def test_the_timed_shapes_are_of_their_classes() -> None:
    for shape, width in ROW_WIDTHS.items():
        assert row_class(width, width) == row_class(2 * width, width, gated=True) == shape
        assert width % 128 == 0
    assert row_class(15360, 3840) == "wide uneven"
    assert row_class(1024, 4096) == "narrow"
    assert row_class(4100, 4096) == "wide uneven"
