"""`add_norm` in plain MLX."""

from __future__ import annotations

import mlx.core as mx

Norm = tuple[mx.array, float]
"""Weight `[n]` and epsilon of a root-mean-square norm."""


def add_norm(
    result: mx.array,
    stream: mx.array,
    after: Norm | None,
    before: Norm | None,
    scale: float = 1.0,
    gain: float = 1.0,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return `sums = gain * (stream + scale * rms_norm(result, after))` and `rms_norm(sums, before)`, all `[T, n]`. Without `after`,
    `result` is not normed; without `before`, the second result is the sums. `gain` must be a number of the dtype.
    `bias` `[n]` is added to the result first."""
    result = result if bias is None else result + bias
    added = result if after is None else mx.fast.rms_norm(result, *after)
    if scale != 1.0:
        # In float32, because the factor itself would lose digits in a 16-bit dtype.
        added = added.astype(mx.float32) * scale
    sums = (stream + added).astype(stream.dtype)
    if gain != 1.0:
        sums = sums * gain
    return sums, sums if before is None else mx.fast.rms_norm(sums, *before)
