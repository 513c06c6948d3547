"""Products with quantized matrices, in the emulator against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.quantized_products import Matrix, matrix, rows_of_x
from support.oracles.sealed_pages import to_float

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.quantized_matmul import reference
from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import (
    BITS,
    GROUPS,
    ROWS,
    block_dequantize,
    block_matmul,
    quantized_matmul,
    rows_of_variant,
    simdgroups_of,
)

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
AFFINE = [f"{bits}/{group}" for bits in BITS for group in GROUPS]
KINDS = [*AFFINE, "mxfp4", *BLOCKS]
DTYPES = (F16, BF16, F32)
COUNTS = (1, 2, 3, 4, 5, 8, 11, 16, 19)
SIZES = ((37, 768), (5, 256), (50, 2304), (16, 512))
"""N and K: tiles that are not full, one to nine steps of 256 numbers."""


def check(kind: str, rows: int, n: int, k: int, dtype: mx.Dtype) -> None:
    weights, x = matrix(kind, n, k, dtype), rows_of_x(rows, k, dtype)
    with emulated():
        weights.check(x, weights.times(x))


@needs_emulator
@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=pytest.mark.slow if i < len(AFFINE) and i % 2 else (), id=kind) for i, kind in enumerate(KINDS)]
)
def test_all_formats(index: int) -> None:
    n, k = SIZES[index % 4]
    check(KINDS[index], COUNTS[index * 4 % 9], n, k, DTYPES[index % 3])


@needs_emulator
@pytest.mark.parametrize("rows", COUNTS)
def test_all_numbers_of_rows(rows: int) -> None:
    check("4/64", rows, 21, 576 + 64 * rows, F16)


@needs_emulator
@pytest.mark.parametrize("kind", ["3/32", "8/32", "mxfp4", "Q5_0"])
def test_rows_that_are_no_multiple_of_256(kind: str) -> None:
    check(kind, 6, 18, 96, BF16)
    check(kind, 2, 18, 544, BF16)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_combinations(kind: str, dtype: mx.Dtype) -> None:
    for rows in COUNTS:
        for n, k in SIZES:
            check(kind, rows, n, k, dtype)


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
@pytest.mark.parametrize(("kind", "rows"), [("5/64", 3), ("3/32", 7), ("mxfp4", 2), ("Q4_K", 1), ("Q6_K", 12)])
def test_sanitizers_are_silent(mode: str, kind: str, rows: int) -> None:
    weights, x = matrix(kind, 19, 768, BF16), rows_of_x(rows, 768, BF16)
    with emulated(mode=mode, order="random"):
        weights.check(x, weights.times(x))


OTHERS = [(mode, kind) for kind in ("2/128", "4/64", "6/32", "8/64", "Q4_0", "Q5_0", "Q8_0", "Q5_K") for mode in ("asan", "msan")]


@needs_emulator
@pytest.mark.parametrize(
    ("mode", "kind"), [pytest.param(*v, marks=pytest.mark.slow if i % 4 in (1, 2) else pytest.mark.long) for i, v in enumerate(OTHERS)]
)
def test_sanitizers_are_silent_in_the_other_formats(mode: str, kind: str) -> None:
    weights, x = matrix(kind, 19, 512, F16), rows_of_x(2, 512, F16)
    with emulated(mode=mode):
        weights.check(x, weights.times(x))


@needs_emulator
@pytest.mark.parametrize(("kind", "rows"), [("4/64", 2), ("6/32", 8), ("Q5_K", 4), ("Q6_K", 16)])
def test_every_schedule_gives_the_same_bits(kind: str, rows: int) -> None:
    weights, x = matrix(kind, 37, 1280, F16), rows_of_x(rows, 1280, F16)
    found = []
    for order in emulator.ORDERS:
        for seed in (1, 2):
            with emulated(order=order, seed=seed):
                found.append(np.array(weights.times(x)))
    assert all(np.array_equal(found[0], other) for other in found)


def weight_traffic(weights: Matrix, rows: int) -> tuple[int, int, int]:
    """Return three byte counts of the matrix: loaded, fetched by a cache of one threadgroup, and total."""
    x = rows_of_x(rows, weights.numbers.shape[1], F16)
    with emulated(), emulator.count_bytes() as counts:
        weights.times(x)
    found = [counts[name] for name in ("weight", "scales", "biases")[: len(weights.arrays)]]
    return sum(t.loaded for t in found), sum(t.fetched for t in found), sum(t.size for t in found)


@needs_emulator
@pytest.mark.parametrize(("kind", "rows"), [("4/64", 16), ("5/32", 8), ("mxfp4", 4), ("Q4_K", 8), ("Q5_K", 16), ("Q6_K", 8)])
def test_the_matrix_is_read_once_for_all_rows(kind: str, rows: int) -> None:
    weights = matrix(kind, 48, 1024, F16)
    loaded, fetched, size = weight_traffic(weights, 1)
    assert fetched == size
    assert weight_traffic(weights, rows) == (loaded, fetched, size)


@needs_emulator
@pytest.mark.parametrize("kind", AFFINE[::4])
def test_every_code_is_loaded_once(kind: str) -> None:
    weights = matrix(kind, 32, 512, F16)
    with emulated(), emulator.count_bytes() as counts:
        weights.times(rows_of_x(8, 512, F16))
    assert (counts["weight"].loaded, counts["weight"].most_loads) == (weights.arrays[0].nbytes, 1)
    assert counts["out"].most_stores == 1


@needs_emulator
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_become_numbers(kind: str) -> None:
    dtype = BF16 if kind[-1] == "K" else F16
    weights = matrix(kind, 7, 768, dtype)
    with emulated(mode="asan" if kind[1] == "4" else "msan"):
        found = block_dequantize(*weights.arrays, kind, dtype)
    assert mx.array_equal(found, reference.dequantized(*weights.arrays, kind, dtype))


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_plain_numbers_are_those_of_ggml(kind: str) -> None:
    weights = matrix(kind, 6, 1024, F32)
    assert np.allclose(to_float(reference.dequantized(*weights.arrays, kind, F32)), weights.numbers, rtol=2e-7, atol=1e-9)
    batch = weights.arrays[0].reshape(2, 3, -1)
    assert mx.array_equal(reference.dequantized(batch, kind, F16)[1, 2], reference.dequantized(*weights.arrays, kind, F16)[5])


@pytest.mark.parametrize("kind", ["4/64", "6/32", "3/128"])
def test_the_codes_are_those_of_mlx(kind: str) -> None:
    weights = matrix(kind, 6, 256, F32)
    bits, group = map(int, kind.split("/"))
    assert np.allclose(to_float(mx.dequantize(*weights.arrays, group, bits)), weights.numbers, rtol=1e-5, atol=1e-5)


def test_variants_are_few_and_threadgroups_small() -> None:
    assert [rows_of_variant(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 40)] == [1, 2, 4, 4, 8, 8, 16, 16, 16]
    assert len(ROWS) <= 5
    for n in (64, 4096, 100_000):
        for steps in range(1, 120):
            simdgroups, most = simdgroups_of(n, 256 * steps), 4 if n > 8000 else 8
            assert 1 <= simdgroups <= most
            assert -(-steps // simdgroups) == -(-steps // most)  # as few rounds as with the most


def test_what_does_not_fit_is_refused() -> None:
    x = rows_of_x(2, 256, F16)
    codes, scales, biases = matrix("4/64", 16, 256, F16).arrays
    with pytest.raises(UnsupportedShapeError, match="7 bits"):
        quantized_matmul(x, codes, scales, biases, bits=7, group_size=64)
    with pytest.raises(UnsupportedShapeError, match="float32"):
        quantized_matmul(x, codes, scales.astype(F32), biases.astype(F32), bits=4, group_size=64)
    with pytest.raises(UnsupportedShapeError, match="Q2_K"):
        block_matmul(x, codes.view(mx.uint8), "Q2_K")
    with pytest.raises(ValueError, match="does not multiply"):
        quantized_matmul(x, codes[:, 1:], scales, biases, bits=4, group_size=64)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        block_matmul(x, mx.zeros((4, 288), mx.uint8), "Q4_K")
    with pytest.raises(ValueError, match="rows to multiply"):
        quantized_matmul(x[:, :250], codes, scales, biases, bits=4, group_size=64)
