"""Decoder blocks: a mixer across tokens, a feed-forward layer per token, and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

import mlx.core as mx

from ..cache.base import AttentionSpec, BidirectionalSpec, Rotation, Step
from ..nn.activations import Gate, fused
from ..nn.attention import Attention
from ..nn.mlp import GatedMLP
from ..nn.norms import RMSNorm
from ..nn.residual_stream import ResidualStream
from ..nn.weights import Weights
from ..util.dataclass import dataclass
from .common import Sizes
from .config_reader import ConfigReader


def attention_specs(sizes: Sizes, windows: Sequence[int | None]) -> tuple[AttentionSpec, ...]:
    """Return the cache specs of attention layers, one per window."""
    heads = sizes.heads
    return tuple(AttentionSpec(heads.kv, heads.dim, heads.dim, window, heads.count) for window in windows)


def pre_norm(
    weights: Weights,
    name: str,
    sizes: Sizes,
    mixer: Mixer,
    mlp: FeedForward,
    *,
    rope: str | None = "rope",
    residual: float = 1.0,
) -> Block:
    """Return the usual block, with a norm before the mixer and before the MLP."""
    norms = Norms(
        before_mixer=RMSNorm.load(weights, f"{name}.input_layernorm", sizes.hidden, sizes.eps),
        before_mlp=RMSNorm.load(weights, f"{name}.post_attention_layernorm", sizes.hidden, sizes.eps),
    )
    return Block(mixer, mlp, norms, rope, residual)


def gated_mlp(weights: Weights, name: str, sizes: Sizes, gate: Gate, *, bias: bool = False) -> GatedMLP:
    """Load the MLP of layer `name`."""
    return GatedMLP.load(weights, f"{name}.mlp", sizes.hidden, sizes.inner, gate, bias=bias)


def is_sparse_layer(reader: ConfigReader, experts: int) -> Callable[[int], bool]:
    """Return a predicate for layers with experts, from `decoder_sparse_step` and `mlp_only_layers`."""
    interval = reader.integer("decoder_sparse_step", 1)
    dense = reader.integers("mlp_only_layers") or []
    return lambda layer: experts > 0 and layer not in dense and (layer + 1) % interval == 0


def bidirectional_specs(sizes: Sizes, windows: Sequence[int | None]) -> tuple[BidirectionalSpec, ...]:
    """Return the cache specs of bidirectional attention layers."""
    heads = sizes.heads
    return tuple(BidirectionalSpec(heads.kv, heads.dim, heads.dim, window, heads.count) for window in windows)


class Mixer(Protocol):
    """Mixes tokens: attention, or a recurrence."""

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """Return `onto + mix(norm(x))`, `[T, hidden]`."""
        ...


class FeedForward(Protocol):
    """Transforms each token independently."""

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """Return `onto + f(norm(x))`, `[T, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of a block, each with a weight `[hidden]` or None."""

    before_mixer: RMSNorm | None = None
    after_mixer: RMSNorm | None = None
    """Applied to the mixer's output before the residual sum."""
    before_mlp: RMSNorm | None = None
    after_mlp: RMSNorm | None = None
    """Applied to the feed-forward output before the residual sum."""
    adds_alone: bool = field(default=False, kw_only=True)
    """True if the block also adds a normed result to a sum that no norm follows."""


@dataclass(frozen=True, slots=True)
class Block:
    """Block with a mixer and a feed-forward layer, each added to the residual stream: `x + residual * after(f(before(x)))`."""

    mixer: Mixer
    """Attention or a recurrence."""
    mlp: FeedForward
    norms: Norms
    rope: str | None = "rope"
    """Key of the block's rope in `Architecture.ropes`; None without positions."""
    residual: float = 1.0
    """Factor of each addition to the stream (Granite)."""

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        rotation = None if self.rope is None else rotations[self.rope]
        norms = self.norms
        onto = x if self.residual == 1.0 and norms.after_mixer is None else None
        y = self.mixer(x, step, rotation, norm=norms.before_mixer, onto=onto)
        x = self._sum(x, y, norms.after_mixer)
        onto = x if self.residual == 1.0 and norms.after_mlp is None else None
        y = self.mlp(x, norm=norms.before_mlp, onto=onto)
        return self._sum(x, y, norms.after_mlp)

    def advance(self, stream: ResidualStream, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> ResidualStream:
        """Advance a stream whose sums and norms are fused kernels; the last sum is left to the next block."""
        rotation = None if self.rope is None else rotations[self.rope]
        x, row = stream.normed(self.norms.before_mixer)
        mixer, bias = self.mixer, None
        if isinstance(mixer, Attention) and mixer.output.bias is not None:
            y, bias = mixer.result_and_bias(row, step, rotation)
        else:
            y = mixer(row, step, rotation)
        x, row = ResidualStream(x, y, self.norms.after_mixer, self.residual, bias=bias).normed(self.norms.before_mlp)
        return ResidualStream(x, self.mlp(row), self.norms.after_mlp, self.residual)

    def added(self, y: mx.array, after: RMSNorm | None) -> mx.array:
        """Return the residual of a part's result `[T, hidden]`, as a separate array."""
        y = y if after is None else after(y)
        return y if self.residual == 1.0 else (y * mx.array(self.residual)).astype(y.dtype)

    def _sum(self, x: mx.array, y: mx.array, after: RMSNorm | None) -> mx.array:
        """Add a part's result to the stream, unless the part has already added it."""
        if self.residual == 1.0:
            return y if after is None else after(y, onto=x)
        return _add_scaled(x, y if after is None else after(y), mx.array(self.residual))


@runtime_checkable
class AnyBlock(Protocol):
    """Interface of a block for the decoder."""

    @property
    def norms(self) -> Norms:
        """Norms around the parts."""
        ...

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        """Map `[T, hidden]` to the same shape. `rotations` are by key of `Architecture.ropes`; `own` `[T, n]` is the per-layer input."""
        ...

    def advance(self, stream: ResidualStream, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> ResidualStream:
        """Advance a stream on a GPU, where the residual sum and the next norm may be one kernel."""
        ...


@dataclass(frozen=True, slots=True)
class SingleBlock:
    """Block with one part and one norm: `x + part(norm(x))` (Nemotron-H)."""

    norm: RMSNorm
    mixer: Mixer | None = None
    """Attention or a recurrence; None for a feed-forward block."""
    mlp: FeedForward | None = None

    @property
    def norms(self) -> Norms:
        return Norms(before_mixer=self.norm)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        if self.mixer is not None:
            return self.mixer(x, step, None, norm=self.norm, onto=x)
        assert self.mlp is not None
        return self.mlp(x, norm=self.norm, onto=x)

    def advance(self, stream: ResidualStream, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> ResidualStream:
        x, row = stream.normed(self.norm)
        if self.mixer is not None:
            return ResidualStream(x, self.mixer(row, step, None))
        assert self.mlp is not None
        return ResidualStream(x, self.mlp(row))


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """Block whose mixer and feed-forward layer read the same normed rows: `x + mix(norm(x)) + f(norm(x))` (Cohere)."""

    mixer: Mixer
    mlp: FeedForward
    norm: RMSNorm
    rope: str | None = "rope"
    """See `Block`."""

    @property
    def norms(self) -> Norms:
        return Norms(before_mixer=self.norm)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        return self._sum(x, self.norm(x), step, rotations)

    def advance(self, stream: ResidualStream, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> ResidualStream:
        return ResidualStream(self._sum(*stream.normed(self.norm), step, rotations))

    def _sum(self, x: mx.array, row: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> mx.array:
        rotation = None if self.rope is None else rotations[self.rope]
        return self.mlp(row, onto=self.mixer(row, step, rotation, onto=x))


@fused
def _add_scaled(x: mx.array, y: mx.array, scale: mx.array) -> mx.array:
    """Add in float32, because the scale would lose digits in a 16-bit dtype."""
    return (x + y * scale).astype(x.dtype)


def with_deepstack(x: mx.array, step: Step, block: int) -> mx.array:
    """Return rows `[T, hidden]` after a block of the model, with `GivenRows.deepstack` added to image rows."""
    given = step.given
    if given is None or not 0 <= block < len(given.deepstack):
        return x
    return x.at[given.rows].add(given.deepstack[block].astype(x.dtype))
