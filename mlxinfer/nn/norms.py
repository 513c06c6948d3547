"""Root-mean-square norms (arXiv:1910.07467), and norms that subtract the mean first (arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .. import kernels_cpu
from .weights import Weights

Sum = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
"""A part's result and the residual stream, `[T, n]` each, to their sum and the normed sum."""


class RMSNorm:
    """`x / rms(x) * weight` along the last axis. `centred` norms (Gemma) are stored as weight minus one."""

    centring = False
    """True if the mean is subtracted first, which fused products and kernels do not support."""

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.sums: dict[tuple[object, ...], Sum] = {}
        """Computations of `ResidualStream` for this norm, by shape of rows."""
        self._compute = _rms_norm_operation()

    @classmethod
    def load(cls, weights: Weights, name: str, size: int, eps: float, *, centred: bool = False) -> RMSNorm:
        """Load `name.weight`, `[size]`."""
        weight = weights.vector(f"{name}.weight", (size,))
        return cls(1 + weight if centred else weight, eps)

    def __call__(self, x: mx.array, onto: mx.array | None = None) -> mx.array:
        """Normalize `[..., n]`; the result is added to `onto`, if given."""
        return self._compute(x, self.weight, self.eps, onto)

    def in_plain_operations(self) -> None:
        """Switch to differentiable operations, which the CPU kernels are not."""
        self._compute = _plain_rms_norm


class LayerNorm(RMSNorm):
    """`(x - mean(x)) / deviation(x) * weight + bias` along the last axis. Without a bias nothing is added (Cohere)."""

    centring = True

    def __init__(self, weight: mx.array, eps: float, bias: mx.array | None = None) -> None:
        super().__init__(weight, eps)
        self.bias = bias
        self._layer_norm = kernels_cpu.layer_norm if kernels_cpu.can_compute_towers() else mx.fast.layer_norm

    @classmethod
    def load_with_bias(cls, weights: Weights, name: str, size: int, eps: float) -> LayerNorm:
        """Load `name.weight` and `name.bias`, `[size]` each."""
        return cls(weights.vector(f"{name}.weight", (size,)), eps, weights.vector(f"{name}.bias", (size,)))

    def __call__(self, x: mx.array, onto: mx.array | None = None) -> mx.array:
        y: mx.array = self._layer_norm(x, self.weight, self.bias, self.eps)
        return y if onto is None else onto + y

    def in_plain_operations(self) -> None:
        self._layer_norm = mx.fast.layer_norm


def _rms_norm_operation() -> Callable[[mx.array, mx.array, float, mx.array | None], mx.array]:
    return kernels_cpu.rms_norm if kernels_cpu.in_use() else _plain_rms_norm


def _plain_rms_norm(x: mx.array, weight: mx.array, eps: float, onto: mx.array | None) -> mx.array:
    y: mx.array = mx.fast.rms_norm(x, weight, eps)
    return y if onto is None else onto + y
