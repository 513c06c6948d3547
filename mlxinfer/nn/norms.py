"""Root-mean-square norms."""

from __future__ import annotations

import mlx.core as mx

from .weights import Weights


class RMSNorm:
    """`x / rms(x) * weight` along the last axis; `centred` norms (Gemma) store their weight around zero and add one."""

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    @classmethod
    def load(cls, weights: Weights, name: str, size: int, eps: float, *, centred: bool = False) -> RMSNorm:
        weight = weights.vector(f"{name}.weight", (size,))
        return cls(1 + weight if centred else weight, eps)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)
