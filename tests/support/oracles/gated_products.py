"""Products with an activation and a gate inside, next to their exact answers."""

from __future__ import annotations

from math import pi, sqrt

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.quantized_matmul.launcher import quantized_matmul

from .quantized_products import Rounding, matrix, rows_of_x
from .sealed_pages import to_float


def gated(kind: str, x: mx.array, half: int, gate: str) -> tuple[mx.array, np.ndarray, np.ndarray]:
    """The kernel's answer, the exact one, and how far off float32 sums may be; numbers of x in which gates are neither 0 nor lines."""
    weights = matrix(kind, 2 * half, x.shape[1], x.dtype)
    bits, group = (4, 32) if kind == "mxfp4" else map(int, kind.split("/"))
    mode = "mxfp4" if kind == "mxfp4" else "affine"
    words, scales, *biases = weights.arrays
    found = quantized_matmul(x, words, scales, biases[0] if biases else None, bits=bits, group_size=group, mode=mode, gate=gate)
    rows = to_float(x).astype(np.float64)
    sums, sizes = rows @ weights.numbers.T, np.abs(rows) @ np.abs(weights.numbers).T
    g, up = sums[:, :half], sums[:, half:]
    steep = g if gate == "silu" else 2 * sqrt(2 / pi) * (g + 0.044715 * g**3)
    exact = g / (1 + np.exp(np.minimum(-steep, 700))) * up
    # The slope of either gate is below 1.13 everywhere.
    slack = 2e-6 * (1.13 * sizes[:, :half] * np.abs(up) + np.abs(g) * sizes[:, half:] + np.abs(exact))
    return found, exact, slack


def check_gated(kind: str, rows: int, half: int, k: int, gate: str, dtype: mx.Dtype = mx.float16) -> None:
    """Run the kernel as the context has it; its answer is the exact one, rounded once."""
    x = rows_of_x(rows, k, mx.float32) * (0.1 / sqrt(k))
    found, exact, slack = gated(kind, x.astype(dtype), half, gate)
    assert (found.shape, found.dtype) == ((rows, half), dtype)
    error = np.abs(to_float(found) - exact)
    smallest = 6e-8 if dtype == mx.float16 else 0
    assert (error <= Rounding[dtype] * 1.001 * np.abs(exact) + slack + smallest).all(), (error - slack).max()
