"""A projection that adapters change: its own product, and what the adapters of a step's rows add."""

from __future__ import annotations

import mlx.core as mx

from .. import kernels_cpu
from ..kernels_cpu import Packed
from ..nn.activations import Gate, gated_again
from ..nn.linear import Linear
from ..nn.norms import RMSNorm
from .batched_lora import Choice, Stack


class AdaptedLinear(Linear):
    """Stands in the place of `base` in the model that steps with adapters go through. It has no matrix of its own."""

    def __init__(self, base: Linear, stack: Stack, choice: Choice) -> None:
        self.base, self.stack, self.choice = base, stack, choice
        self.projections = base.projections

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """As `Linear`."""
        if not self._changes():
            return self.base(x, norm=norm, onto=onto)
        if norm is not None and not (isinstance(self.base.matrix, Packed) and isinstance(self.stack.a, Packed)):
            rows = norm(x)
            if not isinstance(self.base.matrix, Packed):
                x, norm = rows, None  # a packed product norms its rows itself, as it does in steps without adapters
            return self._sum(x, norm, rows, None, onto)
        return self._sum(x, norm, x, norm, onto)

    def _sum(self, x: mx.array, norm: RMSNorm | None, rows: mx.array, rows_norm: RMSNorm | None, onto: mx.array | None) -> mx.array:
        stack, choice = self.stack, self.choice
        if stack.gain is None:
            return stack.added(self.base(x, norm=norm, onto=onto), rows, choice, rows_norm)
        y = stack.added(stack.rescaled(self.base(x, norm=norm), choice), rows, choice, rows_norm)
        return y if onto is None else onto + y

    def can_gate(self, activation: str) -> bool:
        """As `Linear`: where the base can."""
        return self.base.can_gate(activation)

    def gated(self, activation: str, x: mx.array, *, norm: RMSNorm | None = None) -> mx.array:
        """As `Linear`, where `can_gate`. Rows that no adapter changes come out as in a step of their own, to the last bit."""
        if not self._changes():
            return self.base.gated(activation, x, norm=norm)
        changed, same = self.stack.changed, self._gates_alike(activation, x)
        if same and x.shape[0] == 1:
            return self._gated_row(activation, x, norm)
        if same or self.choice.slots <= changed:
            return self._gated(activation, x, norm)
        y = self.base.gated(activation, x, norm=norm)
        return mx.where(self.choice.changed(changed), self._gated(activation, x, norm), y)

    def _gated(self, activation: str, x: mx.array, norm: RMSNorm | None) -> mx.array:
        gate, up = mx.split(self(x, norm=norm), 2, axis=-1)
        return _gate(activation)(gate, up)

    def _gates_alike(self, activation: str, x: mx.array) -> bool:
        """Whether it makes no difference if the gate is a part of the product or comes after it."""
        plain = self.stack.gain is None and self.base.bias is None and isinstance(self.stack.a, Packed)
        return plain and activation == "silu" and x.dtype == mx.float32

    def _gated_row(self, activation: str, x: mx.array, norm: RMSNorm | None) -> mx.array:
        """The update of the only row is the bias of the base's product."""
        assert isinstance(self.base.matrix, Packed)
        bias = self.stack.added(None, x, self.choice, norm).reshape(-1)
        if norm is None:
            return self.base.matrix.multiply(x, bias=bias, gate=activation)
        return self.base.matrix.multiply(x, bias=bias, gate=activation, norm=norm.weight, eps=norm.eps)

    def _changes(self) -> bool:
        return not self.choice.slots.isdisjoint(self.stack.changed)


def _gate(activation: str) -> Gate:
    """The gated unit, for packed matrices."""
    return kernels_cpu.silu_multiply if activation == "silu" else gated_again(activation)
