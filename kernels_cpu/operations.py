"""Elementwise and row-wise operations. Each rejects wrong shapes and dtypes with ValueError before anything is computed."""

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
    """uint32 `[...]`: index of the highest number in each row of float32 `[..., n]`, the first of equal ones. NaN is skipped."""
    return native().argmax(x)


def threshold(logits: mx.array, top_k: mx.array, top_p: mx.array) -> mx.array:
    """float32 `[R]`: in each row of float32 `[R, n]`, the lowest logit kept by top-k, then top-p.

    `top_k` and `top_p` are `[R]`; n or more, and 1 or more, keep everything, which yields minus infinity where both do. A token is kept if
    the tokens before it have less than top_p together, so at least one always is.
    """
    return native().threshold(logits, top_k, top_p)
