"""`add_norm` in plain MLX."""

from __future__ import annotations

import mlx.core as mx

Norm = tuple[mx.array, float]
"""Weight `[n]` and epsilon of a root-mean-square norm."""


def add_norm(result: mx.array, stream: mx.array, after: Norm | None, before: Norm, scale: float = 1.0) -> tuple[mx.array, mx.array]:
    """Return `sums = stream + scale * rms_norm(result, after)` and `rms_norm(sums, before)`, all `[T, n]`. Without `after`, `result` is not
    normed."""
    added = result if after is None else mx.fast.rms_norm(result, *after)
    if scale != 1.0:
        # In float32, because the factor itself would lose digits in a 16-bit dtype.
        added = added.astype(mx.float32) * scale
    sums = (stream + added).astype(stream.dtype)
    return sums, mx.fast.rms_norm(sums, *before)
