"""Feed-forward layers, gated and plain."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .activations import Gate
from .linear import JoinedLinear, Linear
from .norms import RMSNorm
from .weights import Weights


class GatedMLP:
    """`down(activation(gate(x)) * up(x))` (arXiv:2002.05202)."""

    def __init__(self, gate_up: JoinedLinear, down: Linear, gate: Gate) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate = gate

    @classmethod
    def load(cls, weights: Weights, name: str, hidden: int, inner: int, gate: Gate, *, bias: bool = False) -> GatedMLP:
        """Load `gate_proj`, `up_proj` and `down_proj` under `name`."""
        parts = [Linear.load(weights, f"{name}.{part}", inner, hidden, bias=bias) for part in ("gate_proj", "up_proj")]
        down = Linear.load(weights, f"{name}.down_proj", hidden, inner, bias=bias)
        return cls(JoinedLinear(parts, [inner, inner]), down, gate)

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        return self.down(self.gate_up.gated(self.gate, x, norm=norm), onto=onto)


class PlainMLP:
    """`down(activation(up(x)))`."""

    def __init__(self, up: Linear, down: Linear, activation: Callable[[mx.array], mx.array]) -> None:
        self.up = up
        self.down = down
        self.activation = activation

    @classmethod
    def load(
        cls, weights: Weights, name: str, hidden: int, inner: int, activation: Callable[[mx.array], mx.array], *, bias: bool = False
    ) -> PlainMLP:
        """Load `up_proj` and `down_proj` under `name`."""
        up = Linear.load(weights, f"{name}.up_proj", inner, hidden, bias=bias)
        return cls(up, Linear.load(weights, f"{name}.down_proj", hidden, inner, bias=bias), activation)

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        return self.down(self.activation(self.up(x, norm=norm)), onto=onto)
