"""The gated delta net (arXiv:2412.06464) as in Qwen3-Next: a short causal convolution and a recurrence with a decaying state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from ..cache.base import RecurrentSpec, Rotation, Step
from .activations import fused, silu
from .linear import JoinedLinear, Linear
from .norms import RMSNorm

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads and widths. Each key head serves `value_heads / key_heads` neighbouring value heads."""

    hidden: int
    """Channels of the residual stream."""
    key_heads: int
    """Query and key heads."""
    value_heads: int
    """Value heads, a multiple of `key_heads`."""
    key_dim: int
    """Channels per query or key head."""
    value_dim: int
    """Channels per value head."""
    taps: int
    """Width of the convolution, in tokens."""

    @property
    def keys(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def spec(self) -> RecurrentSpec:
        """States: the convolution's last inputs `[taps - 1, channels]`, and the recurrence `[value_heads, value_dim, key_dim]`."""
        return RecurrentSpec(((self.taps - 1, self.channels), (self.value_heads, self.value_dim, self.key_dim)))


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One gated delta net layer."""

    layer: int
    """Index of the layer in the cache."""
    sizes: DeltaSizes
    """Heads and widths."""
    inputs: JoinedLinear
    """Projects `[T, hidden]` to q, k, v `[T, channels]`, beta and decay `[T, value_heads]` each, and the output gate `[T, values]`."""
    output: Linear
    """Projects `[T, values]` to `[T, hidden]`."""
    convolution: mx.array
    """`[channels, taps, 1]`."""
    decay: mx.array
    """Logarithm of the decay rate, float32 `[value_heads]`."""
    decay_bias: mx.array
    """Added to the projected decay, float32 `[value_heads]`."""
    norm: mx.array
    """Weight of the norm on each value head, `[value_dim]`."""
    eps: float
    """Epsilon of that norm."""

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        sizes = self.sizes
        qkv, beta, decay, gate = self.inputs(x, norm=norm)
        y = step.recur(self.layer, mx.concatenate([qkv, beta, decay], axis=-1), self.update)
        heads = mx.fast.rms_norm(y.reshape(-1, sizes.value_heads, sizes.value_dim), self.norm, self.eps)
        return self.output(_gated(heads.reshape(-1, sizes.values), gate), onto=onto)

    def update(self, x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Advance B sequences by L tokens: x `[B, L, channels + 2 * value_heads]`, states as in `DeltaSizes.spec`. Returns `[B, L, values]`
        and the new states."""
        sizes, (window, state) = self.sizes, states
        batch, length = x.shape[:2]
        qkv, beta, decay = mx.split(x, [sizes.channels, sizes.channels + sizes.value_heads], axis=-1)
        row = mx.concatenate([window.astype(qkv.dtype), qkv], axis=1)
        # The kernel wants one dtype throughout, and decays close to one do not survive bfloat16.
        qkv = silu(mx.conv1d(row, self.convolution, groups=sizes.channels)).astype(mx.float32)
        q, k, v = mx.split(qkv, [sizes.keys, 2 * sizes.keys], axis=-1)
        q = _unit(q.reshape(batch, length, sizes.key_heads, sizes.key_dim)) * sizes.key_dim**-0.5
        k = _unit(k.reshape(batch, length, sizes.key_heads, sizes.key_dim))
        v = v.reshape(batch, length, sizes.value_heads, sizes.value_dim)
        kept = _kept(decay, self.decay_bias, self.decay)
        y, state = mx.fast.gated_delta_update(q, k, v, kept, mx.sigmoid(beta.astype(mx.float32)), state)
        return y.reshape(batch, length, sizes.values), (row[:, length:].astype(mx.float32), state)


def _unit(x: mx.array) -> mx.array:
    """`x / sqrt(sum(x^2) + eps)`, by means of the RMS norm, which divides by the mean instead of the sum."""
    dims = x.shape[-1]
    normed: mx.array = mx.fast.rms_norm(x, None, _EPS / dims)
    return normed / math.sqrt(dims)


@fused
def _kept(decay: mx.array, bias: mx.array, logarithm: mx.array) -> mx.array:
    """The fraction of the state that remains after each token, float32."""
    rate = mx.logaddexp(decay.astype(mx.float32) + bias, mx.zeros((), mx.float32))
    return mx.exp(-mx.exp(logarithm) * rate)


@fused
def _gated(x: mx.array, gate: mx.array) -> mx.array:
    return (x.astype(mx.float32) * silu(gate.astype(mx.float32))).astype(gate.dtype)
