"""Activations by their config name, and the gated units built on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..util.dataclass import dataclass
from ..util.device import is_gpu

Elementwise = Callable[..., mx.array]
_FEW_ROWS = 16
"""Most rows for which a function with many operations is compiled for its shape."""


def fused(function: Elementwise, *, shapeless: bool = True) -> Elementwise:
    """Compile on a GPU; without `shapeless`, once per shape. On a CPU, `mx.compile` would need a C++ compiler, which not every machine
    has."""
    if not is_gpu():
        return function
    return cast(Elementwise, mx.compile(function, shapeless=shapeless))


Gate = Callable[[mx.array, mx.array], mx.array]
"""`(gate, up)`, both `[..., ff]`, to `[..., ff]`."""


def silu(x: mx.array) -> mx.array:
    """arXiv:1702.03118."""
    return x * mx.sigmoid(x)


def gelu(x: mx.array) -> mx.array:
    """Exact, with the error function (arXiv:1606.08415)."""
    return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of `gelu`."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def quick_gelu(x: mx.array) -> mx.array:
    """The sigmoid approximation of `gelu`."""
    return x * mx.sigmoid(1.702 * x)


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def relu_squared(x: mx.array) -> mx.array:
    """arXiv:2109.08668."""
    return mx.square(relu(x))


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": relu_squared,
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
}


@dataclass(frozen=True, slots=True)
class Activated:
    """`activation(gate) * up`."""

    activation: str
    """Name of the activation in this module, for kernels that compute it."""
    compute: Gate

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        return self.compute(gate, up)


def elementwise(name: str) -> Callable[[mx.array], mx.array]:
    """Return the activation with this name. Raises `UnsupportedModelError`."""
    activation = _ACTIVATIONS.get(name)
    if activation is None:
        raise UnsupportedModelError(f"activation {name!r} is not supported (known: {', '.join(sorted(_ACTIVATIONS))})")
    return activation


def gated(name: str) -> Activated:
    """Return `activation(gate) * up` for the activation with this name. Raises `UnsupportedModelError`."""
    activation = elementwise(name)

    def unit(gate: mx.array, up: mx.array) -> mx.array:
        return activation(gate) * up

    return Activated(activation.__name__, _fused_for_rows(unit) if activation is gelu_tanh else fused(unit))


def _fused_for_rows(function: Elementwise) -> Elementwise:
    """Fuse a function that MLX splits into two kernels when compiled for all shapes, because it counts the broadcasts of scalars.

    Compiled for one shape, the function is one kernel; that is done for few rows.
    """
    if not is_gpu():
        return function
    many, few = fused(function), fused(function, shapeless=False)
    return lambda gate, up: (few if gate.size <= _FEW_ROWS * gate.shape[-1] else many)(gate, up)


def gated_again(activation: str) -> Gate:
    """Return the gated unit for a value of `Activated.activation`."""
    function = next(each for each in _ACTIVATIONS.values() if each.__name__ == activation)
    return lambda gate, up: function(gate) * up


@dataclass(frozen=True, slots=True)
class ScaledGate:
    """`activation(before * gate) * up * after`."""

    activation: str
    """Name of the activation in this module."""
    before: float
    """Factor of the gate."""
    after: float
    """Factor of the result."""
    compute: Gate

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        return self.compute(gate, up)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gated unit of gpt-oss: `g * sigmoid(alpha * g) * (u + 1)`, with g clamped from above and u on both sides to `limit`."""

    alpha: float
    """Factor within the sigmoid."""
    limit: float
    """Bound of gates (from above) and ups (on both sides)."""
    compute: Gate

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        return self.compute(gate, up)


def clamped_swiglu(alpha: float, limit: float) -> ClampedSwiglu:
    """The gated unit of gpt-oss."""

    def gate_and_up(gate: mx.array, up: mx.array) -> mx.array:
        gate = mx.minimum(gate, limit)
        up = mx.clip(up, -limit, limit)
        return gate * mx.sigmoid(alpha * gate) * (up + 1)

    return ClampedSwiglu(alpha, limit, fused(gate_and_up))
