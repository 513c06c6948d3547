"""Sums of products of inputs, in float32, on whatever is quickest: MLX on a GPU, NumPy's library on a CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...util.device import is_gpu


def to_numpy(array: mx.array) -> np.ndarray:
    """In float32; a view where it has that dtype."""
    return np.array(array.astype(mx.float32), copy=False)


def add_gram(sums: np.ndarray, rows: mx.array) -> None:
    """Add `x^T x` of `rows` `[tokens, in]` to `sums` float32 `[in, in]`, computed in float32 whatever the dtype of the rows: sums of
    16 bits would lose what tells columns apart."""
    x = rows.astype(mx.float32)
    if is_gpu():
        sums += np.array(x.T @ x)
    else:
        plain = np.array(x, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):  # whoever uses the sums says where NaN comes from
            sums += plain.T @ plain


def matmul(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`left @ right` in float32."""
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    found: np.ndarray = np.array(mx.array(left) @ mx.array(right)) if is_gpu() else left @ right
    return found
