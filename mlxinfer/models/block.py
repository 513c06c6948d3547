"""A decoder block: a mixer across tokens, a feed-forward layer on each token, and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx

from ..cache.base import AttentionSpec, BidirectionalSpec, Rotation, Step
from ..nn.activations import Gate, fused
from ..nn.mlp import GatedMLP
from ..nn.norms import RMSNorm
from ..nn.residual_stream import Stream
from ..nn.weights import Weights
from ..util.dataclass import dataclass
from .common import Sizes
from .config_reader import ConfigReader


def attention_specs(sizes: Sizes, windows: Sequence[int | None]) -> tuple[AttentionSpec, ...]:
    """The cache specs of attention layers, one per window."""
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
    """The usual block: one norm before the mixer and one before the MLP."""
    norms = Norms(
        before_mixer=RMSNorm.load(weights, f"{name}.input_layernorm", sizes.hidden, sizes.eps),
        before_mlp=RMSNorm.load(weights, f"{name}.post_attention_layernorm", sizes.hidden, sizes.eps),
    )
    return Block(mixer, mlp, norms, rope, residual)


def gated_mlp(weights: Weights, name: str, sizes: Sizes, gate: Gate, *, bias: bool = False) -> GatedMLP:
    """Load the MLP of the layer called `name`."""
    return GatedMLP.load(weights, f"{name}.mlp", sizes.hidden, sizes.inner, gate, bias=bias)


def is_sparse_layer(reader: ConfigReader, experts: int) -> Callable[[int], bool]:
    """A function that tells whether a layer has experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    interval = reader.integer("decoder_sparse_step", 1)
    dense = reader.integers("mlp_only_layers") or []
    return lambda layer: experts > 0 and layer not in dense and (layer + 1) % interval == 0


def bidirectional_specs(sizes: Sizes, windows: Sequence[int | None]) -> tuple[BidirectionalSpec, ...]:
    """The same for layers that look both ways."""
    heads = sizes.heads
    return tuple(BidirectionalSpec(heads.kv, heads.dim, heads.dim, window, heads.count) for window in windows)


class Mixer(Protocol):
    """Mixes tokens: attention, or a recurrence."""

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`onto + mix(norm(x))`, `[T, hidden]`."""
        ...


class FeedForward(Protocol):
    """Works on each token separately."""

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """`onto + f(norm(x))`, `[T, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a block; None where the block has none."""

    before_mixer: RMSNorm | None = None
    """Weight `[hidden]`, as in all four."""
    after_mixer: RMSNorm | None = None
    """Applied to the mixer's output, before it is added to the stream."""
    before_mlp: RMSNorm | None = None
    """Applied to the feed-forward layer's input."""
    after_mlp: RMSNorm | None = None
    """Applied to its output, before it is added to the stream."""


@dataclass(frozen=True, slots=True)
class Block:
    """A mixer and a feed-forward layer, each added to the residual stream: `x + residual * after(f(before(x)))`."""

    mixer: Mixer
    """Attention or a recurrence."""
    mlp: FeedForward
    """The feed-forward layer."""
    norms: Norms
    """Norms before and after both."""
    rope: str | None = "rope"
    """Key of the block's rope in `Architecture.ropes`; None where positions are not encoded."""
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

    def advance(self, stream: Stream, step: Step, rotations: Mapping[str, Rotation]) -> Stream:
        """The same where adding to the stream and the next norm are one kernel: what the last part adds is left to the next block."""
        rotation = None if self.rope is None else rotations[self.rope]
        x, row = stream.normed(self.norms.before_mixer)
        y = self.mixer(row, step, rotation)
        x, row = Stream(x, y, self.norms.after_mixer, self.residual).normed(self.norms.before_mlp)
        return Stream(x, self.mlp(row), self.norms.after_mlp, self.residual)

    def added(self, y: mx.array, after: RMSNorm | None) -> mx.array:
        """What a part's result `[T, hidden]` adds to the stream, where that is a value of its own."""
        y = y if after is None else after(y)
        return y if self.residual == 1.0 else (y * mx.array(self.residual)).astype(y.dtype)

    def _sum(self, x: mx.array, y: mx.array, after: RMSNorm | None) -> mx.array:
        """Add a part's result to the stream, unless the part has done so itself because nothing comes between."""
        if self.residual == 1.0:
            return y if after is None else after(y, onto=x)
        return _add_scaled(x, y if after is None else after(y), mx.array(self.residual))


@runtime_checkable
class AnyBlock(Protocol):
    """What a decoder needs of a block."""

    @property
    def norms(self) -> Norms:
        """The norms that come between its parts."""
        ...

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        """`[T, hidden]` to the same shape; rotations by key of `Architecture.ropes`, `own` `[T, n]` from `Architecture.inputs`."""
        ...

    def advance(self, stream: Stream, step: Step, rotations: Mapping[str, Rotation]) -> Stream:
        """The same on a GPU where adding to the stream and the next norm may be one kernel."""
        ...


@dataclass(frozen=True, slots=True)
class SingleBlock:
    """One part with one norm: `x + part(norm(x))` (Nemotron-H)."""

    norm: RMSNorm
    """Weight `[hidden]`."""
    mixer: Mixer | None = None
    """Attention or a recurrence."""
    mlp: FeedForward | None = None
    """Or a feed-forward layer."""

    @property
    def norms(self) -> Norms:
        return Norms(before_mixer=self.norm)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        if self.mixer is not None:
            return self.mixer(x, step, None, norm=self.norm, onto=x)
        assert self.mlp is not None
        return self.mlp(x, norm=self.norm, onto=x)

    def advance(self, stream: Stream, step: Step, rotations: Mapping[str, Rotation]) -> Stream:
        x, row = stream.normed(self.norm)
        if self.mixer is not None:
            return Stream(x, self.mixer(row, step, None))
        assert self.mlp is not None
        return Stream(x, self.mlp(row))


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """A mixer and a feed-forward layer that read the same normed rows: `x + mix(norm(x)) + f(norm(x))` (Cohere)."""

    mixer: Mixer
    """Attention or a recurrence."""
    mlp: FeedForward
    """The feed-forward layer."""
    norm: RMSNorm
    """Weight `[hidden]`."""
    rope: str | None = "rope"
    """As in `Block`."""

    @property
    def norms(self) -> Norms:
        return Norms(before_mixer=self.norm)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        return self._sum(x, self.norm(x), step, rotations)

    def advance(self, stream: Stream, step: Step, rotations: Mapping[str, Rotation]) -> Stream:
        return Stream(self._sum(*stream.normed(self.norm), step, rotations))

    def _sum(self, x: mx.array, row: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> mx.array:
        rotation = None if self.rope is None else rotations[self.rope]
        return self.mlp(row, onto=self.mixer(row, step, rotation, onto=x))


@fused
def _add_scaled(x: mx.array, y: mx.array, scale: mx.array) -> mx.array:
    """In float32, because the scale itself would lose digits in a 16-bit dtype."""
    return (x + y * scale).astype(x.dtype)
