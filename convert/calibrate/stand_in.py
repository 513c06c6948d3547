"""A matrix that another object stands in for, to see what it is multiplied with."""

from __future__ import annotations

import mlx.core as mx

from ...kernels_cpu import Packed


class StandIn(Packed):
    """Products hand everything to a packed matrix, norm, bias and residual included, so this passes for one."""

    __slots__ = ()
    data = layout = dtype = precision = None  # type: ignore[assignment]  # none of its own that could be packed or evaluated

    def normed(self, x: mx.array, norm: mx.array, eps: float) -> mx.array:
        """The rows that are multiplied, `[..., in]`."""
        raise NotImplementedError

    def product(self, x: mx.array, bias: mx.array | None, residual: mx.array | None, experts: mx.array | None) -> mx.array:
        """As `Packed.multiply`, of rows that are normed."""
        raise NotImplementedError

    def can_gate(self, activation: str) -> bool:
        return False

    def multiply(
        self,
        x: mx.array,
        *,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        norm: mx.array | None = None,
        eps: float = 0.0,
        gate: str | None = None,
        experts: mx.array | None = None,
    ) -> mx.array:
        assert gate is None
        return self.product(x if norm is None else self.normed(x, norm, eps), bias, residual, experts)
