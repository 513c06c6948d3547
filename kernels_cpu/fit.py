"""Codes and scales of a matrix in MLX's affine format, fitted to the importance of its numbers (see src/encode/fit.h)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .native import in_use, native

_STORED = {mx.float32: 0, mx.bfloat16: 1, mx.float16: 2}


def can_fit() -> bool:
    """True if `fit_affine` can be called; an older module lacks it."""
    return in_use() and hasattr(native, "fit_affine")


def fit_affine(
    weight: np.ndarray, importance: np.ndarray, *, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 `[rows, in]`, scales and biases float32 `[rows, in / group_size]` with values of `dtype`, which minimise
    `sum(importance * (weight - decoded)^2)` in each group.

    `weight` float32 `[rows, in]`; `importance` float32 `[rows, in]`, or `[1, in]` for all rows. Raises ValueError for shapes that do not
    fit, and for groups whose size is not a multiple of 32.
    """
    rows, columns = weight.shape
    groups = (rows, columns // group_size)
    codes, scales, biases = np.empty((rows, columns), np.uint8), np.empty(groups, np.float32), np.empty(groups, np.float32)
    weight, importance = np.ascontiguousarray(weight, np.float32), np.ascontiguousarray(importance, np.float32)
    native.fit_affine(weight, importance, bits, _STORED[dtype], codes, scales, biases)
    return codes, scales, biases
