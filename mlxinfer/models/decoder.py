"""The skeleton that every family shares: embedding, a stack of blocks, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from ..cache.base import LayerSpec, Rotation, Step
from ..nn.fuse import fused
from ..nn.linear import Embedding, Linear
from ..nn.norms import RMSNorm
from ..nn.rope import Rope
from ..nn.weights import Weights
from .sizes import Sizes


class Mixer(Protocol):
    """What mixes tokens: attention, or a recurrence."""

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`onto + mix(norm(x))`, `[T, hidden]`."""
        ...


class FeedForward(Protocol):
    """What works on each token alone."""

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """`onto + f(norm(x))`, `[T, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a block, None where there is none."""

    before_mixer: RMSNorm | None = None
    after_mixer: RMSNorm | None = None
    before_mlp: RMSNorm | None = None
    after_mlp: RMSNorm | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A mixer and a feed-forward layer, each added to the stream: `x + residual * after(f(before(x)))`.

    `rope` is the key of the block's rope in its architecture, None where positions are not encoded.
    """

    mixer: Mixer
    mlp: FeedForward
    norms: Norms
    rope: str | None = "rope"
    residual: float = 1.0

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> mx.array:
        rotation = None if self.rope is None else rotations[self.rope]
        norms = self.norms
        onto = x if self.residual == 1.0 and norms.after_mixer is None else None
        y = self.mixer(x, step, rotation, norm=norms.before_mixer, onto=onto)
        x = self._sum(x, y, norms.after_mixer)
        onto = x if self.residual == 1.0 and norms.after_mlp is None else None
        y = self.mlp(x, norm=norms.before_mlp, onto=onto)
        return self._sum(x, y, norms.after_mlp)

    def _sum(self, x: mx.array, y: mx.array, after: RMSNorm | None) -> mx.array:
        """A part's result with the stream that it is added to, which it has done itself if nothing comes between."""
        if self.residual == 1.0:
            return y if after is None else after(y, onto=x)
        return _add_scaled(x, y if after is None else after(y), mx.array(self.residual))


@fused
def _add_scaled(x: mx.array, y: mx.array, scale: mx.array) -> mx.array:
    """In float32: the scale itself would lose digits in a half-precision dtype."""
    return (x + y * scale).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Architecture:
    """All that a config says. `block(weights, layer)` asks for the tensors of one block."""

    sizes: Sizes
    specs: tuple[LayerSpec, ...]
    ropes: Mapping[str, Rope]
    block: Callable[[Weights, int], Block]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    final_norm: Callable[[Weights], RMSNorm] | None = None
    notes: tuple[str, ...] = field(default=())


def keep_lazy(node: object) -> None:
    """Leave a finished part of the model unevaluated."""


class Decoder:
    """A causal language model on a flat row of tokens; implements `models.base.Model`."""

    def __init__(self, model_type: str, plan: Architecture, weights: Weights, ready: Callable[[object], None] = keep_lazy) -> None:
        """`ready` is called with each part as soon as its tensors were asked for; a loader evaluates it (`nn.tree.arrays`) there, so
        that what projections were joined from is freed before the next block is read."""
        sizes = plan.sizes
        self.model_type = model_type
        self.vocab_size = sizes.vocab
        self.layers = plan.specs
        self.notes = plan.notes
        self.ropes = dict(plan.ropes)
        self.max_context = max((rope.context for rope in self.ropes.values()), default=sizes.positions)
        self.recompute_at = min((r.boundary for r in self.ropes.values() if r.boundary is not None), default=None)
        self.embedding_scale = plan.embedding_scale
        self.logit_scale = plan.logit_scale
        self.logit_cap = plan.logit_cap

        make_norm = plan.final_norm or (lambda w: RMSNorm.load(w, "model.norm", sizes.hidden, sizes.eps))
        self.norm = make_norm(weights)
        table = weights.matrix("model.embed_tokens.weight", (sizes.vocab, sizes.hidden))
        self.embedding = Embedding(table, self.norm.weight.dtype)
        ready(self.embedding)
        self.blocks: list[Block] = []
        for layer in range(sizes.layers):
            self.blocks.append(plan.block(weights, layer))
            ready(self.blocks[-1])
        self.head = load_head(weights, sizes.vocab, sizes.hidden)
        ready([self.norm, self.head])

    def hidden(self, tokens: mx.array, step: Step) -> mx.array:
        """int32 `[T]` to the last block's normed states `[T, hidden]`; keys, values and states go to the cache."""
        rotations = {name: rope.at(step) for name, rope in self.ropes.items()}
        x = self.embedding(tokens)
        if self.embedding_scale != 1.0:
            x = x * mx.array(self.embedding_scale, x.dtype)
        for block in self.blocks:
            x = block(x, step, rotations)
        return self.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` to `[R, vocab]` in float32."""
        y = (self.head(hidden) if self.head else self.embedding.as_linear(hidden)).astype(mx.float32)
        if self.logit_scale != 1.0:
            y = y * self.logit_scale
        if self.logit_cap is not None:
            y = mx.tanh(y / self.logit_cap) * self.logit_cap
        return y


def load_head(weights: Weights, vocab: int, hidden: int) -> Linear | None:
    """The output matrix, or None where the checkpoint has none and the embedding serves. The tensors decide, not the config's
    `tie_word_embeddings`: as in transformers, a head that is there is used even if the config ties it."""
    return Linear.load(weights, "lm_head", vocab, hidden) if weights.has("lm_head.weight") else None
