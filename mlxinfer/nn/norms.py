"""Root-mean-square norms."""

from __future__ import annotations

import mlx.core as mx

from .weights import Weights


class RMSNorm:
    """`x / rms(x) * weight` along the last axis; `centred` norms (Gemma) store their weight around zero and add one."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float, *, centred: bool = False) -> None:
        weight = weights.vector(f"{name}.weight", (size,))
        self.weight = 1 + weight if centred else weight
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)
