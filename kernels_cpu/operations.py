"""The operations, typed and described. Each refuses wrong shapes and dtypes with ValueError before anything is computed."""

from __future__ import annotations

import mlx.core as mx

from .native import native


def silu_multiply(gate: mx.array, up: mx.array) -> mx.array:
    """`gate * sigmoid(gate) * up`, both `[..., n]` in one floating dtype, computed in float32."""
    return native().silu_multiply(gate, up)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, onto: mx.array | None = None) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight` along the last axis of `[..., n]`, `weight` `[n]`, added to `onto` of the shape of x."""
    return native().rms_norm(x, weight, eps, onto)


def argmax(x: mx.array) -> mx.array:
    """uint32 `[...]`: where each row of float32 `[..., n]` is highest, the first such place. NaN is passed over."""
    return native().argmax(x)


def threshold(logits: mx.array, top_k: mx.array, top_p: mx.array) -> mx.array:
    """float32 `[R]`: the lowest logit that top-k, then top-p of what is left keep in each row of float32 `[R, n]`.

    `top_k` and `top_p` are `[R]`; n or more and 1 or more keep all, which gives minus infinity where both do. A token stays if less than
    top_p lies before it, so one always does.
    """
    return native().threshold(logits, top_k, top_p)
