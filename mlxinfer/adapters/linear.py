"""A projection that adapters change: its own product, and what the adapters of a step's rows add."""

from __future__ import annotations

import mlx.core as mx

from ..kernels_cpu import Packed
from ..nn.activations import gated_again
from ..nn.linear import Linear
from ..nn.norms import RMSNorm
from .stacked import Choice, Stack


class AdaptedLinear(Linear):
    """Stands in the place of `base` in the model that steps with adapters go through. It has no matrix of its own."""

    def __init__(self, base: Linear, stack: Stack, choice: Choice) -> None:
        self.base, self.stack, self.choice = base, stack, choice
        self.projections = base.projections

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """As `Linear`."""
        if not self._changes():
            return self.base(x, norm=norm, onto=onto)
        rows = x if norm is None else norm(x)
        if not isinstance(self.base.matrix, Packed):
            x, norm = rows, None  # a packed product norms its rows itself, as it does in steps without adapters
        delta = self.stack.delta(rows, self.choice)
        assert delta is not None
        if self.stack.gain is None:
            return self.base(x, norm=norm, onto=onto) + delta
        y = self.stack.rescaled(self.base(x, norm=norm), self.choice) + delta
        return y if onto is None else onto + y

    def can_gate(self, activation: str) -> bool:
        """Not where something is added to all rows before the activation."""
        return not self.choice.slots <= self.stack.changed and self.base.can_gate(activation)

    def gated(self, activation: str, x: mx.array, *, norm: RMSNorm | None = None) -> mx.array:
        """As `Linear`, where `can_gate`. Rows that no adapter changes come out as in a step of their own, to the last bit."""
        y = self.base.gated(activation, x, norm=norm)
        if not self._changes():
            return y
        gate, up = mx.split(self(x, norm=norm), 2, axis=-1)
        return mx.where(self.choice.changed(self.stack.changed), gated_again(activation)(gate, up), y)

    def _changes(self) -> bool:
        return bool(self.choice.slots & self.stack.changed)
