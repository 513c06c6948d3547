"""Matrices packed from the blocks of GGUF files have the numbers that the gguf package gives, and their products those of float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Where the float16s are in a block; at its beginning, where a type is not named."""
BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5}
BITS |= {"Q2_K": 3.125, "Q3_K": 3.5625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
KINDS = st.sampled_from(list(BITS))


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bytes but in the float16s, `[rows, bytes of a row]` for a matrix of that many blocks to a row."""
    rng = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        blocks[..., at : at + 2] = rng.normal(0, 0.01, (*shape, 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(-1, shape[-1] * size)


def numbers(kind: str, rows: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dequantize(rows, GGMLQuantizationType[kind])


def in_pieces(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[at : at + size] for at in range(0, len(rows), size))


def pack(kind: str, shape: tuple[int, ...], rows: np.ndarray, precision: str = "float32", piece: int = 1000) -> kernels_cpu.Packed:
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    return kernels_cpu.pack_gguf(kind, (*shape[:-1], shape[-1] * block), in_pieces(rows, piece), precision=precision)


def test_every_type_is_tested():
    assert kernels_cpu.gguf_types().keys() == BITS.keys()


@settings(max_examples=examples(80))
@given(kind=KINDS, n=st.integers(1, 70), blocks=st.integers(1, 4), piece=st.integers(1, 80), seed=st.integers(0, 99))
def test_rows_are_exact(kind, n, blocks, piece, seed):
    rows = random_blocks(kind, (n, blocks), seed)
    packed = pack(kind, (n, blocks), rows, piece=piece)
    np.testing.assert_array_equal(np.array(packed.rows(mx.arange(n), mx.float32)), numbers(kind, rows))


@settings(max_examples=examples(150))
@given(
    kind=KINDS,
    n=st.integers(1, 70),
    blocks=st.integers(1, 4),
    count=st.sampled_from([1, 2, 3, 5, 8, 16, 31]),
    precision=st.sampled_from(["float32", "int16", "int8"]),
    seed=st.integers(0, 99),
)
def test_products(kind, n, blocks, count, precision, seed):
    rows = random_blocks(kind, (n, blocks), seed)
    exact = numbers(kind, rows).astype(np.float64)
    x = np.random.default_rng(seed).standard_normal((count, exact.shape[1])).astype(np.float32)
    got = np.array(pack(kind, (n, blocks), rows, precision).multiply(mx.array(x)))
    # Codes without their zero or bias are larger than the numbers: sums of those are what is rounded.
    largest = np.abs(x) @ np.broadcast_to(np.abs(exact).max(axis=1), (x.shape[1], n)) + 1e-9
    loss = {"float32": 3e-6, "int16": 4e-5, "int8": 6e-3}[precision]
    assert (np.abs(got - x @ exact.T) / largest).max() < loss


@pytest.mark.parametrize("kind", BITS)
def test_size(kind):
    packed = pack(kind, (32, 8), random_blocks(kind, (32, 8), 0))
    assert packed.data.nbytes * 8 / np.prod(packed.shape) == BITS[kind]


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q6_K"])
def test_experts(kind):
    rows = random_blocks(kind, (3, 20, 2), 1)
    packed = pack(kind, (3, 20, 2), rows, piece=7)
    exact = numbers(kind, rows).reshape(3, 20, -1)
    x = np.random.default_rng(0).standard_normal((4, exact.shape[-1])).astype(np.float32)
    chosen = [2, 0, 1, 2]
    got = np.array(packed.multiply(mx.array(x), experts=mx.array(chosen)))
    np.testing.assert_allclose(got, np.einsum("tk,tnk->tn", x, exact[chosen]), atol=1e-3)


@pytest.mark.parametrize("kind", BITS)
def test_infinities_reach_what_they_meet(kind):
    rows = random_blocks(kind, (20, 2), 3)
    exact = numbers(kind, rows)
    x = np.ones((2, exact.shape[1]), np.float32)
    x[0, 17] = np.inf
    with np.errstate(invalid="ignore"):
        want = x @ exact.T
    got = np.array(pack(kind, (20, 2), rows).multiply(mx.array(x)))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got[np.isfinite(want)], want[np.isfinite(want)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", BITS)
def test_scales_that_are_no_numbers(kind, value):
    for at in HALVES.get(kind, (0,)):
        rows = random_blocks(kind, (20, 2), 3)
        size = rows.shape[1] // 2
        rows[17, size + at : size + at + 2] = np.array([value], "<f2").view(np.uint8)
        with pytest.raises(ValueError, match="NaN or infinite"):
            pack(kind, (20, 2), rows)


def test_what_does_not_fit():
    rows = random_blocks("Q6_K", (4, 1), 0)
    with pytest.raises(ValueError, match="no matrices"):
        kernels_cpu.pack_gguf("Q6_K", (4, 255), [rows])
    with pytest.raises(ValueError, match="no matrices"):
        kernels_cpu.pack_gguf("IQ4_NL", (4, 256), [rows])
    with pytest.raises(ValueError, match="do not fit"):
        kernels_cpu.pack_gguf("Q6_K", (3, 256), [rows])
    with pytest.raises(ValueError, match="do not fit"):
        kernels_cpu.pack_gguf("Q6_K", (4, 512), [rows])
