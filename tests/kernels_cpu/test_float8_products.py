"""Products with 8-bit floats whose scales are floats, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.packs_float8(), reason="the CPU kernels are not there, or older than products with fp8")


def made(shape: tuple[int, ...], group: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, np.ndarray]:
    """Codes as words, scales, and the numbers in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    scales = mx.array(rng.normal(0, 1e-3, (*shape[:-1], shape[-1] // group)).astype(np.float32)).astype(dtype)
    plain = np.array(mx.from_fp8(mx.array(codes), mx.float32), np.float64)
    truth = plain * np.repeat(np.array(scales.astype(mx.float32), np.float64), group, axis=-1)
    return mx.array(codes.view(np.uint32)), scales, truth


def packed(words: mx.array, scales: mx.array, group: int) -> kernels_cpu.Packed:
    return kernels_cpu.pack(words, scales, group_size=group, bits=8, mode="fp8")


@pytest.mark.parametrize(
    ("n", "k", "group"), [(40, 256, 128), (16, 96, 32), (33, 192, 64), (20, 320, 320), (5, 1856, 64), (128, 4096, 4096)]
)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_products(n: int, k: int, group: int, rows: int) -> None:
    words, scales, truth = made((n, k), group)
    x = np.random.default_rng(1).normal(0, 1, (rows, k)).astype(np.float32)
    found = np.array(packed(words, scales, group).multiply(mx.array(x)))
    assert np.abs(found - x @ truth.T).max() < 1e-6 * np.abs(x @ truth.T).max()


def test_rows_are_the_numbers_rounded_once() -> None:
    words, scales, truth = made((33, 256), 128)
    rows = packed(words, scales, 128).rows(mx.arange(33), mx.float32)
    assert np.array_equal(np.array(rows), truth.astype(np.float32))


def test_experts_and_a_gate() -> None:
    words, scales, truth = made((3, 64, 96), 96)
    x = np.random.default_rng(1).normal(0, 1, (2, 96)).astype(np.float32)
    matrix = packed(words, scales, 96)
    chosen = mx.array([[0, 2], [1, 0]])
    found = np.array(matrix.multiply(mx.array(x), experts=chosen))
    expected = np.stack([np.stack([truth[e] @ x[t] for e in pair]) for t, pair in enumerate(chosen.tolist())])  # type: ignore[arg-type]
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    gate, up = np.split(expected, 2, axis=-1)
    gated = np.array(matrix.multiply(mx.array(x), experts=chosen, gate="silu"))
    assert np.allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("dtype", "bytes_of_a_scale"), [(mx.float32, 4), (mx.bfloat16, 2), (mx.float16, 2)])
def test_the_size_is_that_of_codes_and_scales(dtype: mx.Dtype, bytes_of_a_scale: int) -> None:
    words, scales, _ = made((64, 4096), 128, dtype=dtype)
    wide = packed(words, scales.astype(mx.float32), 128)
    assert wide.data.nbytes == 64 * 4096 + 64 * 32 * bytes_of_a_scale
    assert np.array_equal(np.array(wide.data), np.array(packed(words, scales, 128).data))


def test_a_row_that_is_not_finite_is_alone() -> None:
    words, scales, truth = made((16, 64), 32)
    x = np.ones((3, 64), np.float32)
    x[1, 5] = np.inf
    found = np.array(packed(words, scales, 32).multiply(mx.array(x)))
    assert np.isfinite(found[[0, 2]]).all()
    expected = np.sign(truth[:, 5]) * np.inf
    assert np.array_equal(found[1][truth[:, 5] != 0], expected[truth[:, 5] != 0])


@pytest.mark.parametrize(("group", "scale_dtype", "match"), [(48, mx.float32, "no such format"), (32, mx.uint8, "scales must be floats")])
def test_refusals(group: int, scale_dtype: mx.Dtype, match: str) -> None:
    words = mx.zeros((16, 24), mx.uint32)
    with pytest.raises(ValueError, match=match):
        packed(words, mx.zeros((16, 96 // group), scale_dtype), group)
