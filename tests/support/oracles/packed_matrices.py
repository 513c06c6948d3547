"""Random matrices in every format that is packed, their products in float64, and how far rounding may take those computed."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxinfer import kernels_cpu

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance of neighbouring floats, relative to them."""

LIMITS = {"int16": 127 * 128, "int8": 127}
"""Codes of activations reach from -limit to limit."""

AFFINE = [("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32), *(("plain", 0, 1),)]


def to_numpy(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(DTYPES[dtype])


@dataclass
class Matrix:
    """`[..., n, k]` as MLX has it. `values` are exact; `sizes` are what the products of a weight's terms can be, scale * code and bias."""

    arrays: list[mx.array]
    options: dict[str, object]
    values: np.ndarray
    sizes: np.ndarray

    def pack(self, precision: str | None = None) -> kernels_cpu.Packed:
        return kernels_cpu.pack(*self.arrays, **self.options, precision=precision)


def draw(rng: np.random.Generator, form: tuple[str, int, int], shape: tuple[int, ...], scales: str = "bfloat16") -> Matrix:
    """Every code is as likely as any other. `scales` is the dtype of affine scales, and of plain matrices."""
    mode, bits, group = form
    *leading, k = shape
    if mode == "plain":
        weight = random(rng, shape, scales)
        return Matrix([weight], {}, to_numpy(weight), np.abs(to_numpy(weight)))
    options = {"group_size": group, "bits": bits, "mode": mode}
    words = mx.array(rng.integers(0, 2**32, (*leading, k * bits // 32), dtype=np.uint32))
    of_group = (*leading, k // group)
    if mode == "affine":
        scale, bias = random(rng, of_group, scales), random(rng, of_group, scales)
        ones = mx.ones(of_group)
        codes = to_numpy(mx.dequantize(words, ones, mx.zeros(of_group), **options))
        s, b = (np.repeat(to_numpy(a), group, -1) for a in (scale, bias))
        return Matrix([words, scale, bias], options, s * codes + b, np.abs(s * codes) + np.abs(b))
    low, high = (120, 134) if mode.startswith("mx") else (0, 127)  # powers of two about 1; all positive floats of 8 bits
    scale = mx.array(rng.integers(low, high, of_group).astype(np.uint8))
    if mode == "mxfp8":  # without NaN
        words = mx.where((words & 0x7F7F7F7F) == words, words, words & 0xBEBEBEBE)
        words = words & 0xFEFEFEFE
    values = to_numpy(mx.dequantize(words, scale, **options, dtype=mx.float32))
    return Matrix([words, scale], options, values, np.abs(values))


def normed(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    return x if weight is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def product(x: np.ndarray, m: Matrix, precision: str, is_normed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """`x @ m.T` and the largest error that its computation may have: what rounding x costs, and the sums in float32."""
    k = x.shape[-1]
    blocks = -(-k // 32)
    steps = 40 + 3 * blocks + (k / 8 + 12 if is_normed else 0)  # each rounds once
    error = steps * UNIT["float32"] * (np.abs(x) @ m.sizes.T)
    if precision in LIMITS:
        padded = np.pad(np.abs(x), [(0, 0), (0, blocks * 32 - k)]).reshape(len(x), blocks, 32)
        step = padded.max(-1) / LIMITS[precision] + 1e-30
        sizes = np.pad(np.abs(m.values), [(0, 0), (0, blocks * 32 - k)]).reshape(len(m.values), blocks, 32).sum(-1)
        error = error + 0.505 * step @ sizes.T  # half a step each; the quotient by the step is rounded, too
    return x @ m.values.T, error


def assert_within(got: mx.array, want: np.ndarray, error: np.ndarray, dtype: str) -> None:
    """`error`, and the rounding of the result to its dtype (the smallest halves are 2^-24 apart)."""
    assert got.dtype == DTYPES[dtype]
    allowed = error * 1.01 + 1.01 * UNIT[dtype] * np.abs(want) + 2.0**-25
    off = np.abs(to_numpy(got) - want)
    assert got.shape == want.shape
    assert (off <= allowed).all(), f"off by {(off / allowed).max():.2f} times what rounding explains"
