"""The operations, typed and described. Each refuses wrong shapes and dtypes with ValueError before anything is computed."""

from __future__ import annotations

import mlx.core as mx

from .native import native


def silu_multiply(gate: mx.array, up: mx.array) -> mx.array:
    """`gate * sigmoid(gate) * up`, both `[..., n]` in one floating dtype, computed in float32."""
    return native().silu_multiply(gate, up)
