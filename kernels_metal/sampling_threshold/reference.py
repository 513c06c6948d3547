"""`sampling_threshold` in plain MLX, by sorting."""

from __future__ import annotations

import mlx.core as mx


def threshold(logits: mx.array, top_k: mx.array | None, top_p: mx.array | None) -> mx.array:
    """Return the lowest logit that stays in each row of `[R, vocab]`, `[R, 1]`: of the `top_k` `[R, 1]` highest, those with less than
    `top_p` `[R, 1]` of their probability before them. None cuts nothing."""
    ordered = -mx.sort(-logits, axis=-1)
    keep = mx.ones(ordered.shape, mx.bool_)
    if top_k is not None:
        keep = mx.arange(ordered.shape[-1])[None] < top_k
    if top_p is not None:
        probabilities = mx.softmax(mx.where(keep, ordered, -mx.inf), axis=-1)
        before = mx.cumsum(probabilities, axis=-1) - probabilities
        keep = keep & ((before < top_p) | (top_p >= 1))
    return mx.min(mx.where(keep, ordered, mx.inf), axis=-1, keepdims=True)
