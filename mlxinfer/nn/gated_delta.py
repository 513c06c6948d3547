"""The gated delta net (arXiv:2412.06464): a short causal convolution and a recurrence with a decaying state. Whole heads decay
(Qwen3-Next), or single channels of keys (Kimi Delta Attention, arXiv:2510.26692)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Protocol

import mlx.core as mx

from ..cache.base import RecurrentSpec, Rotation, Step
from ..kernels_metal.kernel_trial import KernelTrial
from ..util.dataclass import dataclass
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
    value_heads: int
    """Value heads, a multiple of `key_heads`."""
    key_dim: int
    value_dim: int
    taps: int
    """Width of the convolution, in tokens."""
    by_channel: bool = False
    """True if each channel of a key has a decay rate, instead of each head."""

    @property
    def decays(self) -> int:
        """Decay rates per token."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

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


@fused
def gated_by_silu(x: mx.array, gate: mx.array) -> mx.array:
    """`x * silu(gate)`, computed in float32."""
    return (x.astype(mx.float32) * silu(gate.astype(mx.float32))).astype(gate.dtype)


@fused
def gated_by_sigmoid(x: mx.array, gate: mx.array) -> mx.array:
    """`x * sigmoid(gate)`, computed in float32."""
    return (x.astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))).astype(gate.dtype)


class DeltaInputs(Protocol):
    """Projects the residual stream to the inputs of a layer."""

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None) -> list[mx.array]:
        """Project `[T, hidden]`, after `norm`, to q, k, v `[T, channels]` (in one array or in three), beta `[T, value_heads]`, decay
        `[T, decays]`, and last the output gate `[T, values]`."""
        ...


@dataclass(frozen=True, slots=True)
class NarrowInputs:
    """Inputs with a narrow projection before decay and gate."""

    wide: JoinedLinear
    """To q, k and v, beta, and the narrow rows of decay and gate."""
    decay: Linear
    """Narrow rows to `[T, decays]`."""
    gate: Linear
    """Narrow rows to `[T, values]`."""

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None) -> list[mx.array]:
        """See `DeltaInputs`."""
        *parts, decay, gate = self.wide(x, norm=norm)
        return [*parts, self.decay(decay), self.gate(gate)]


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One gated delta net layer."""

    layer: int
    sizes: DeltaSizes
    inputs: DeltaInputs
    """Projects `[T, hidden]` to queries, keys, values, beta, decay and the output gate."""
    output: Linear
    """Projects `[T, values]` to `[T, hidden]`."""
    convolution: mx.array
    """`[channels, taps, 1]`."""
    decay: mx.array
    """Logarithm of the decay rate, float32 `[decays]`."""
    decay_bias: mx.array
    """Added to the projected decay, float32 `[decays]`."""
    norm: mx.array
    """Weight of the norm on each value head, `[value_dim]`."""
    eps: float
    gate: Callable[[mx.array, mx.array], mx.array] = gated_by_silu
    """Weights the normed heads by the output gate."""

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        sizes = self.sizes
        *parts, gate = self.inputs(x, norm=norm)
        y = step.recur(self.layer, mx.concatenate(parts, axis=-1), self.update)
        heads = mx.fast.rms_norm(y.reshape(-1, sizes.value_heads, sizes.value_dim), self.norm, self.eps)
        return self.output(self.gate(heads.reshape(-1, sizes.values), gate), onto=onto)

    def update(self, x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Advance B sequences by L tokens: x `[B, L, channels + value_heads + decays]`, states as in `DeltaSizes.spec`. Returns
        `[B, L, values]` and the new states."""
        sizes, (window, state) = self.sizes, states
        batch, length = x.shape[:2]
        qkv, beta, decay = mx.split(x, [sizes.channels, sizes.channels + sizes.value_heads], axis=-1)
        row = mx.concatenate([window.astype(qkv.dtype), qkv], axis=1)
        # The kernel needs one dtype throughout, and bfloat16 cannot represent decays close to one.
        qkv = _activated(mx.conv1d(row, self.convolution, groups=sizes.channels))
        q, k, v = mx.split(qkv, [sizes.keys, 2 * sizes.keys], axis=-1)
        q = _scaled_to_length(q.reshape(batch, length, sizes.key_heads, sizes.key_dim), sizes.key_dim**-0.5)
        k = _scaled_to_length(k.reshape(batch, length, sizes.key_heads, sizes.key_dim), 1.0)
        v = v.reshape(batch, length, sizes.value_heads, sizes.value_dim)
        kept, beta = _remaining_fraction(decay, self.decay_bias, self.decay), _sigmoid(beta)
        if sizes.by_channel:
            y, state = by_channel(q, k, v, kept.reshape(batch, length, sizes.value_heads, sizes.key_dim), beta, state)
        else:
            y, state = mx.fast.gated_delta_update(q, k, v, kept, beta, state)
        return y.reshape(batch, length, sizes.values), (row[:, length:].astype(mx.float32), state)


def _scaled_to_length(x: mx.array, length: float) -> mx.array:
    """Return `length * x / sqrt(sum(x^2) + eps)`, computed by the RMS norm, which divides by the mean instead of the sum."""
    dims = x.shape[-1]
    return mx.fast.rms_norm(x, _equal_weights(dims, length / math.sqrt(dims)), _EPS / dims)


@cache
def _equal_weights(count: int, number: float) -> mx.array:
    """Return `count` equal weights of a norm."""
    found = mx.full((count,), number, mx.float32)
    mx.eval(found)
    return found


@fused
def _activated(x: mx.array) -> mx.array:
    return silu(x).astype(mx.float32)


@fused
def _sigmoid(x: mx.array) -> mx.array:
    return mx.sigmoid(x.astype(mx.float32))


@fused
def _remaining_fraction(decay: mx.array, bias: mx.array, logarithm: mx.array) -> mx.array:
    """Return the fraction of the state that remains after each token, float32."""
    rate = mx.logaddexp(decay.astype(mx.float32) + bias, 0.0)
    return mx.exp(-mx.exp(logarithm) * rate)


def by_channel(q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Apply the delta rule with one decay per channel of a key: q, k, kept `[B, L, H, Dk]`, v `[B, L, H, Dv]`, beta `[B, L, H]`, state
    `[B, H, Dv, Dk]`, all float32. Returns `[B, L, H, Dv]` and the new state.

    MLX's operation accepts these decays, but documents only one per head, so a trial precedes its use.
    """
    if TRIAL.obstacle(k.shape[2], k.shape[3], v.shape[3]) is not None:
        return _token_by_token(q, k, v, kept, beta, state)
    y, state = mx.fast.gated_delta_update(q, k, v, kept, beta, state)
    return y, state


def _token_by_token(q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    rows = []
    for token in range(q.shape[1]):
        state = state * kept[:, token, :, None]
        key = k[:, token, :, None]
        change = (v[:, token] - (state * key).sum(axis=-1)) * beta[:, token, :, None]
        state = state + change[..., None] * key
        rows.append((state * q[:, token, :, None]).sum(axis=-1))
    return mx.stack(rows, axis=1), state


_TRIED = (1, 5, 20)
"""Numbers of tokens: MLX has kernels for few and for many (above 16), for certain numbers of heads of 128 channels, and plain operations
otherwise."""


def _check_operation(heads: int, key_dim: int, value_dim: int) -> str | None:
    """Compare MLX's operation with the definition for `heads` heads of these widths, on 2 sequences. Return the difference, or None."""

    def some(seed: int, *shape: int) -> mx.array:
        return mx.random.uniform(0.1, 1.0, (2, *shape), key=mx.random.key(seed))

    for count in _TRIED:
        q, k, kept = (some(seed, count, heads, key_dim) for seed in (1, 2, 3))
        inputs = (q, k / key_dim**0.5, some(4, count, heads, value_dim), kept, some(5, count, heads), some(6, heads, value_dim, key_dim))
        found, expected = mx.fast.gated_delta_update(*inputs), _token_by_token(*inputs)
        if not all(bool(mx.allclose(one, other, rtol=1e-4, atol=1e-4)) for one, other in zip(found, expected, strict=True)):
            return f"it differs from the definition for {count} tokens"
    return None


TRIAL = KernelTrial("decay of single channels", _check_operation)
