"""Mamba 2 (arXiv:2405.21060): a short causal convolution, and a state per head with a decay rate per token."""

from __future__ import annotations

from math import isfinite

import mlx.core as mx

from ..cache.base import RecurrentSpec, Rotation, Step
from ..util.dataclass import dataclass
from .activations import fused, silu
from .gated_delta import gated_by_silu
from .linear import Linear
from .norms import RMSNorm
from .weights import Weights, load_convolution

CHUNK = 64
"""Tokens per chunk: the cost of products grows with its square, and each chunk computes states once."""


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Heads and widths."""

    hidden: int
    """Channels of the residual stream."""
    heads: int
    dim: int
    state: int
    """State size per channel of a head."""
    groups: int
    """Groups of neighbouring heads that share vectors for writing and reading the state."""
    taps: int
    """Width of the convolution, in tokens."""
    least: float = 0.0
    """Smallest step, after the softplus."""
    most: float = float("inf")

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: heads, then the vectors that write and read the state."""
        return self.inner + 2 * self.groups * self.state

    @property
    def spec(self) -> RecurrentSpec:
        """States: the convolution's last inputs `[taps - 1, channels]`, and the heads' states `[heads, dim, state]`."""
        return RecurrentSpec(((self.taps - 1, self.channels), (self.heads, self.dim, self.state)))


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One Mamba 2 layer."""

    layer: int
    sizes: MambaSizes
    inputs: Linear
    """Projects `[T, hidden]` to the gate `[T, inner]`, the convolution's input `[T, channels]` and the steps `[T, heads]`."""
    output: Linear
    """Projects `[T, inner]` to `[T, hidden]`."""
    convolution: mx.array
    """`[channels, taps, 1]`."""
    bias: mx.array | None
    """Bias of the convolution, `[channels]`."""
    decay: mx.array
    """Logarithm of the decay rate, float32 `[heads]`."""
    skip: mx.array
    """Factor of the input that is added to the output, float32 `[heads]`."""
    step_bias: mx.array
    """Added to the projected steps, float32 `[heads]`."""
    norm: mx.array | None
    """Weight of the norm of the gated output, `[inner]`, computed per group of heads; None without a norm."""
    eps: float
    norm_first: bool = False
    """True if the norm precedes the gate."""
    gains: mx.array | None = None
    """Factors of the projected input, float32 `[inner + channels + heads]` (Falcon-H1)."""

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        layer: int,
        sizes: MambaSizes,
        *,
        bias: bool,
        conv_bias: bool,
        eps: float,
        normed: bool = True,
        norm_first: bool = False,
        gains: mx.array | None = None,
    ) -> Mamba2:
        """Load the tensors under `name`."""
        decay, skip, step_bias = (weights.vector(f"{name}.{part}", (sizes.heads,), dtype=mx.float32) for part in ("A_log", "D", "dt_bias"))
        return cls(
            layer,
            sizes,
            Linear.load(weights, f"{name}.in_proj", sizes.inner + sizes.channels + sizes.heads, sizes.hidden, bias=bias),
            Linear.load(weights, f"{name}.out_proj", sizes.hidden, sizes.inner, bias=bias),
            load_convolution(weights, f"{name}.conv1d", sizes.channels, sizes.taps),
            weights.vector(f"{name}.conv1d.bias", (sizes.channels,)) if conv_bias else None,
            decay,
            skip,
            step_bias,
            weights.vector(f"{name}.norm.weight", (sizes.inner,)) if normed else None,
            eps,
            norm_first,
            gains,
        )

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        projected = self.inputs(x, norm=norm)
        projected = projected if self.gains is None else (projected * self.gains).astype(x.dtype)
        gate, rest = mx.split(projected, [self.sizes.inner], axis=-1)
        y = step.recur(self.layer, rest, self.update)
        if self.norm is None:
            y = gated_by_silu(y, gate)
        elif self.norm_first:
            y = gated_by_silu(self._normed(y) * self.norm, gate)
        else:
            y = _weighted_in_weight_dtype(self._normed(_gated_in_float32(y, gate)), self.norm)
        return self.output(y.astype(x.dtype), onto=onto)

    def _normed(self, y: mx.array) -> mx.array:
        return mx.fast.rms_norm(y.reshape(y.shape[0], self.sizes.groups, -1), None, self.eps).reshape(y.shape)

    def update(self, x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Advance B sequences by L tokens: x `[B, L, channels + heads]`, states as in `MambaSizes.spec`. Returns float32
        `[B, L, inner]` and the new states."""
        sizes, (window, state) = self.sizes, states
        batch, length = x.shape[:2]
        mixed, steps = mx.split(x, [sizes.channels], axis=-1)
        row = mx.concatenate([window.astype(mixed.dtype), mixed], axis=1)
        mixed = mx.conv1d(row, self.convolution, groups=sizes.channels)
        mixed = _activated(mixed) if self.bias is None else _activated_with_bias(mixed, self.bias)
        heads, write, read = mx.split(mixed, [sizes.inner, sizes.inner + sizes.groups * sizes.state], axis=-1)
        heads = heads.reshape(batch, length, sizes.heads, sizes.dim)
        write, read = (part.reshape(batch, length, sizes.groups, sizes.state) for part in (write, read))
        steps = _softplus(steps, self.step_bias)
        if sizes.least > 0 or isfinite(sizes.most):
            steps = mx.clip(steps, sizes.least, sizes.most)
        advance = self._token if length == 1 else self._chunks
        y, state = advance(heads, steps, write, read, state)
        y = _sum_of_product(y, heads, self.skip[:, None])
        return y.reshape(batch, length, sizes.inner), (row[:, length:].astype(mx.float32), state)

    def _token(self, heads: mx.array, steps: mx.array, write: mx.array, read: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """Compute `_chunk` for one token, in two launches on a GPU."""
        batch, groups = heads.shape[0], self.sizes.groups
        shape = (batch, groups, -1, *state.shape[2:])  # heads of a group together
        rates = self.decay.reshape(groups, -1, 1, 1)
        steps, heads = steps.reshape(batch, groups, -1, 1, 1), heads.reshape(batch, groups, -1, self.sizes.dim, 1)
        state = _advanced(state.reshape(shape), steps, rates, heads, write.reshape(batch, groups, 1, 1, -1))
        y = state.reshape(batch, groups, -1, self.sizes.state) @ read.reshape(batch, groups, -1, 1)
        return y.reshape(batch, 1, self.sizes.heads, self.sizes.dim), state.reshape(batch, self.sizes.heads, *state.shape[3:])

    def _chunks(self, heads: mx.array, steps: mx.array, write: mx.array, read: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """Compute `_chunk` for any number of tokens."""
        length, outputs = heads.shape[1], []
        for start in range(0, length, CHUNK):
            part = slice(start, min(start + CHUNK, length))
            y, state = self._chunk(heads[:, part], steps[:, part], write[:, part], read[:, part], state)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state

    def _chunk(self, heads: mx.array, steps: mx.array, write: mx.array, read: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        """Compute outputs from the state before the chunk and the chunk's tokens, each decayed until the reading token.

        Heads `[B, L, H, P]`, steps `[B, L, H]`, write and read `[B, L, G, N]`, state `[B, H, P, N]` to `[B, L, H, P]` and the state after
        the chunk.
        """
        length, each = heads.shape[1], self.sizes.heads // self.sizes.groups
        sums = mx.cumsum(steps * -mx.exp(self.decay), axis=1).swapaxes(1, 2)  # [B, H, L], log of the remaining fraction
        fed = (heads * steps[..., None]).swapaxes(1, 2)  # [B, H, L, P]
        writes, reads = (mx.repeat(part.swapaxes(1, 2), each, axis=1) for part in (write, read))  # [B, H, L, N]
        y = (reads @ state.swapaxes(-1, -2)) * mx.exp(sums)[..., None]
        own = mx.where(_causal(length), mx.exp(mx.minimum(sums[..., :, None] - sums[..., None, :], 0.0)), 0.0)
        y = y + ((reads @ writes.swapaxes(-1, -2)) * own) @ fed
        left = mx.exp(sums[..., -1:] - sums)[..., None]
        state = state * mx.exp(sums[..., -1])[..., None, None] + (fed * left).swapaxes(-1, -2) @ writes
        return y.swapaxes(1, 2), state


@fused
def _activated(x: mx.array) -> mx.array:
    return silu(x.astype(mx.float32))


@fused
def _activated_with_bias(x: mx.array, bias: mx.array) -> mx.array:
    return silu((x + bias).astype(mx.float32))


@fused
def _softplus(steps: mx.array, bias: mx.array) -> mx.array:
    return mx.logaddexp(steps.astype(mx.float32) + bias, 0.0)


@fused
def _advanced(state: mx.array, steps: mx.array, rates: mx.array, heads: mx.array, write: mx.array) -> mx.array:
    """Return the state after a token."""
    return state * mx.exp(steps * -mx.exp(rates)) + heads * steps * write


@fused
def _sum_of_product(y: mx.array, x: mx.array, factor: mx.array) -> mx.array:
    return y + x * factor


@fused
def _gated_in_float32(y: mx.array, gate: mx.array) -> mx.array:
    return y * silu(gate.astype(mx.float32))


@fused
def _weighted_in_weight_dtype(y: mx.array, weight: mx.array) -> mx.array:
    return (y * weight).astype(weight.dtype)


def _causal(length: int) -> mx.array:
    positions = mx.arange(length)
    return positions[:, None] >= positions[None]
