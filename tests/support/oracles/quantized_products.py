"""Quantized matrices of random codes, and their numbers in float64, unpacked independently of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import block_matmul, quantized_matmul

from .sealed_pages import to_float

Rounding = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix `[N, K]`."""

    kind: str
    """A GGUF type, "mxfp4", or bits and group of affine codes as in "4/64"."""
    arrays: tuple[mx.array, ...]
    """Codes, then scales and biases where they are apart."""
    numbers: np.ndarray
    """float64 `[N, K]`."""

    def times(self, x: mx.array) -> mx.array:
        """The kernel's `[rows, N]`."""
        if self.kind in BLOCKS:
            return block_matmul(x, *self.arrays, self.kind)
        if self.kind == "mxfp4":
            return quantized_matmul(x, *self.arrays, None, bits=4, group_size=32, mode="mxfp4")
        bits, group = map(int, self.kind.split("/"))
        return quantized_matmul(x, *self.arrays, bits=bits, group_size=group)

    def check(self, x: mx.array, found: mx.array) -> None:
        """Within a rounding of the result, and what float32 sums of exact products can differ by."""
        rows = to_float(x).astype(np.float64)
        exact = rows @ self.numbers.T
        assert found.shape == exact.shape
        assert found.dtype == x.dtype
        sums = np.abs(rows) @ np.abs(self.numbers).T
        error = np.abs(to_float(found) - exact)
        assert (error <= Rounding[x.dtype] * 1.001 * np.abs(exact) + 1e-6 * sums).all(), (error / sums).max()


def matrix(kind: str, n: int, k: int, dtype: mx.Dtype) -> Matrix:
    """Random codes in a format; scales and biases of affine ones are in `dtype`."""
    random = np.random.default_rng(n * k)
    if kind in BLOCKS:
        weight = blocks(kind, n, k, random)
        numbers = dequantize(weight, GGMLQuantizationType(BLOCKS[kind].id)).astype(np.float64)
        return Matrix(kind, (mx.array(weight),), numbers)
    bits, group = (4, 32) if kind == "mxfp4" else map(int, kind.split("/"))
    words = random.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32)
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(n, k, bits)
    codes = (stream.astype(np.int64) << np.arange(bits)).sum(-1)
    if kind == "mxfp4":
        powers = random.integers(118, 131, (n, k // 32), dtype=np.uint8)
        values = np.where(codes < 8, 1, -1) * _FP4[codes % 8]
        return Matrix(kind, (mx.array(words), mx.array(powers)), values * np.repeat(2.0 ** (powers.astype(np.float64) - 127), 32, axis=1))
    scales = mx.array(random.normal(size=(n, k // group)).astype(np.float32)).astype(dtype)
    biases = mx.array(random.normal(size=(n, k // group)).astype(np.float32)).astype(dtype)
    spread = [np.repeat(to_float(a).astype(np.float64), group, axis=1) for a in (scales, biases)]
    return Matrix(kind, (mx.array(words), scales, biases), spread[0] * codes + spread[1])


def blocks(kind: str, n: int, k: int, random: np.random.Generator) -> np.ndarray:
    """uint8 `[N, bytes of a row]`: random codes and scales, and a float16 of a usual size wherever a block has one."""
    form = BLOCKS[kind]
    found = random.integers(0, 256, (n, k // form.numbers, form.bytes), dtype=np.uint8)
    for at in form.halves:
        halves = random.normal(size=(n, k // form.numbers, 1)).astype(np.float16) * np.float16(0.01)
        found[..., at : at + 2] = halves.view(np.uint8)
    return found.reshape(n, -1)


def rows_of_x(rows: int, k: int, dtype: mx.Dtype) -> mx.array:
    return mx.array(np.random.default_rng(rows).normal(size=(rows, k)).astype(np.float32)).astype(dtype)
