"""Products of one row, in the emulator against float64; and what they load."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.gated_products import check_gated, gated
from support.oracles.quantized_products import matrix, rows_of_x

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.quantized_matmul.launcher import BITS, GATES, GROUPS, parts_of_row, quantized_matmul

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
KINDS = [*(f"{bits}/{group}" for bits in BITS for group in GROUPS), "mxfp4"]
DTYPES = (F16, BF16, F32)
SIZES = ((1, 4096), (7, 1152), (40, 640), (1000, 128), (5, 5248), (102, 256))
"""N and K: no whole block of four rows, one to nine runs of a lane, lanes without one, shared and unshared K."""


def check(kind: str, n: int, k: int, dtype: mx.Dtype, **emulation: str) -> None:
    weights, x = matrix(kind, n, k, dtype), rows_of_x(1, k, dtype)
    with emulated(**emulation):  # type: ignore[arg-type]
        weights.check(x, weights.times(x))


@needs_emulator
@pytest.mark.parametrize(("index", "kind"), enumerate(KINDS), ids=KINDS)
def test_all_formats(index: int, kind: str) -> None:
    check(kind, *SIZES[index % len(SIZES)], DTYPES[index % 3])


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_combinations(kind: str, dtype: mx.Dtype) -> None:
    for n, k in SIZES:
        check(kind, n, k, dtype)


@needs_emulator
@pytest.mark.long
def test_a_large_matrix_whose_rows_are_not_shared() -> None:
    assert parts_of_row(2046, 2144, 4) == (1, 2)
    check("4/32", 2046, 2144, F16)


@needs_emulator
@pytest.mark.parametrize("kind", ["4/32", "3/32", "8/32", "mxfp4"])
def test_rows_that_are_no_multiple_of_a_lanes_runs(kind: str) -> None:
    for n, k in ((7, 32), (9, 96), (5, 1056), (3, 4128)):
        check(kind, n, k, BF16)


@needs_emulator
@pytest.mark.parametrize("kind", ["4/64", "2/32", "8/64", "mxfp4"])
def test_numbers_of_x_that_are_large_and_small(kind: str) -> None:
    """Codes are subnormal numbers of 16 bits, but their products with x are normal in float32."""
    weights, x = matrix(kind, 9, 512, BF16), rows_of_x(1, 512, BF16)
    for size in (1e-25, 1e-6, 1e3, 1e25):
        row = (x.astype(F32) * size).astype(BF16)
        with emulated():
            weights.check(row, weights.times(row))


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
@pytest.mark.parametrize(
    ("kind", "n", "k"), [("4/64", 11, 2112), ("8/32", 6, 544), ("mxfp4", 13, 3200), ("5/64", 52, 64), ("2/128", 3, 256)]
)
def test_sanitizers_are_silent(mode: str, kind: str, n: int, k: int) -> None:
    check(kind, n, k, BF16, mode=mode, order="random")


@needs_emulator
@pytest.mark.parametrize(("kind", "n", "k"), [("4/64", 37, 5120), ("6/32", 21, 1280), ("mxfp4", 30, 8192), ("8/64", 72, 64)])
def test_every_schedule_gives_the_same_bits(kind: str, n: int, k: int) -> None:
    weights, x, found = matrix(kind, n, k, F16), rows_of_x(1, k, F16), []
    for order in emulator.ORDERS:
        for seed in (1, 2):
            with emulated(order=order, seed=seed):
                found.append(np.array(weights.times(x)))
    assert all(np.array_equal(found[0], other) for other in found)


@needs_emulator
@pytest.mark.parametrize(("n", "k"), [(48, 4096), (64, 64)])
@pytest.mark.parametrize("kind", ["2/64", "3/32", "4/64", "4/128", "8/32", "mxfp4"])
def test_the_matrix_is_loaded_once_and_x_once_for_four_rows(kind: str, n: int, k: int) -> None:
    group = 32 if kind == "mxfp4" else int(kind.split("/")[1])
    k = max(k, group)
    weights = matrix(kind, n, k, F16)
    with emulated(), emulator.count_bytes() as counts:
        weights.times(rows_of_x(1, k, F16))
    assert (counts["weight"].loaded, counts["weight"].most_loads) == (counts["weight"].size, 1)
    for name in ("scales", "biases")[: len(weights.arrays) - 1]:
        assert counts[name].fetched == counts[name].size
        assert counts[name].most_loads == group // (16 if kind[0] == "8" else 32)
    assert (counts["x"].loaded, counts["x"].most_loads) == (n // 4 * 2 * k, n // 4)
    assert (counts["out"].stored, counts["out"].most_stores) == (2 * n, 1)


@needs_emulator
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("kind", "half", "k", "dtype"), [("4/64", 37, 1600, BF16), ("8/128", 5, 4096, F16), ("mxfp4", 51, 96, BF16), ("3/32", 1, 576, F32)]
)
def test_gated(kind: str, half: int, k: int, dtype: mx.Dtype, gate: str) -> None:
    with emulated():
        check_gated(kind, 1, half, k, gate, dtype)


@needs_emulator
def test_a_gated_matrix_is_loaded_once() -> None:
    with emulated(), emulator.count_bytes() as counts:
        gated("4/64", rows_of_x(1, 2048, F16), 40, "silu")
    assert (counts["weight"].loaded, counts["weight"].most_loads) == (counts["weight"].size, 1)
    assert counts["x"].most_loads == 20
    assert (counts["out"].stored, counts["out"].most_stores) == (80, 1)


def test_how_many_simdgroups_share_a_row() -> None:
    """A matrix with few rows has more of them, but none without numbers; threadgroups are not of one simdgroup if there is more to do."""
    assert parts_of_row(14336, 4096, 4, cores=32) == (1, 2)
    assert parts_of_row(4096, 4096, 4, cores=32) == (2, 1)
    assert parts_of_row(4096, 4096, 8, cores=32) == (2, 1)
    assert parts_of_row(4096, 4096, 4, cores=10) == (1, 2)
    assert parts_of_row(1024, 4096, 4, cores=32) == (4, 1)
    assert parts_of_row(1024, 4096, 8, cores=32) == (8, 1)
    assert parts_of_row(1024, 4096, 8, cores=10) == (2, 1)
    assert parts_of_row(1024, 2560, 4, cores=32) == (3, 1)
    assert parts_of_row(576, 576, 4, cores=32) == (1, 2)
    assert parts_of_row(3, 64, 4) == (1, 1)
    for n in (1, 9, 100, 1000, 4096, 10000):
        for k in (32, 960, 4096, 16384):
            for bits in (4, 8):
                for cores in (10, 64):
                    shares, blocks = parts_of_row(n, k, bits, cores)
                    assert 1 <= shares * blocks <= 8
                    assert 32 * (shares - 1) < k // (16 if bits == 8 else 32)


def test_a_matrix_of_less_than_eight_words_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="1 by 32"):
        quantized_matmul(rows_of_x(1, 32, F16), *matrix("4/32", 1, 32, F16).arrays, bits=4, group_size=32)
