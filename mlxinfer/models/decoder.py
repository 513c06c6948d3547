"""The skeleton shared by all families: embedding, a stack of blocks, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ..cache.base import LayerSpec, Rotation, Step
from ..nn.kernel_trial import kernels_in_use
from ..nn.linear import Embedding, Linear
from ..nn.norms import RMSNorm
from ..nn.residual import Stream, fallback_lines
from ..nn.rope import Rope
from ..nn.weights import Weights
from ..records import dataclass
from .block import AnyBlock
from .common import Sizes
from .fused_blocks import runs

if TYPE_CHECKING:
    from .hooks import Hooks


class Model(Protocol):
    """A causal language model over one flat row of tokens. Holds weights only; all state is in the cache."""

    model_type: str
    vocab_size: int
    max_context: int
    """Positions that the config allows."""
    layers: tuple[LayerSpec, ...]
    """What each layer stores in the cache, which is laid out accordingly."""
    recompute_at: int | None
    """A length beyond which every token is rotated differently (longrope): the engine then recomputes the sequence."""
    notes: tuple[str, ...]
    """Messages for the user at load time."""

    def rotation(self, length: int) -> tuple[int, ...]:
        """Equal for all lengths at which a sequence's tokens are rotated in the same way."""
        ...

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None) -> mx.array:
        """int32 `[T]` to the last layer's states `[T, hidden]` as `logits` takes them, keys and values appended to the cache."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` to `[R, vocab]`, float32, with the model's own scaling and cap."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that a config says."""

    sizes: Sizes
    """Counts and widths."""
    specs: tuple[LayerSpec, ...]
    """What each layer stores in the cache."""
    ropes: Mapping[str, Rope]
    """By the key in `Block.rope`."""
    block: Callable[[Weights, int], AnyBlock]
    """`block(weights, layer)` asks for the tensors of one block."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_cap: float | None = None
    """Cap c: logits become `c * tanh(logits / c)`."""
    final_norm: Callable[[Weights], RMSNorm] | None = None
    """Loads the last norm; None: a plain RMS norm at `model.norm`."""
    embedding: str = "model.embed_tokens.weight"
    """Name of the embedding."""
    inputs: Callable[[Weights], LayerInputs] | None = None
    """Loads what gives every block an input of its own, for families that have such."""
    notes: tuple[str, ...] = field(default=())
    """Messages for the user at load time."""


class LayerInputs(Protocol):
    """Makes an input for each block."""

    def __call__(self, tokens: mx.array, x: mx.array) -> mx.array:
        """int32 `[T]` and their embeddings `[T, hidden]` to `[layers, T, n]`."""
        ...


def keep_lazy(node: object) -> None:
    """Leave a finished part of the model unevaluated: the default of `Decoder`'s `ready`."""


class Decoder:
    """A causal language model on a flat row of tokens; implements `Model`."""

    def __init__(self, model_type: str, plan: Architecture, weights: Weights, ready: Callable[[object], None] = keep_lazy) -> None:
        """`ready` is called with each part once its tensors were asked for; a loader evaluates it there (`nn.packing.settle`), so that the
        sources of joined projections are freed before the next block is read."""
        sizes = plan.sizes
        self.model_type = model_type
        self.vocab_size = sizes.vocab
        self.layers = plan.specs
        self.ropes = dict(plan.ropes)
        self.max_context = max((rope.context for rope in self.ropes.values()), default=sizes.positions)
        self.recompute_at = min((r.boundary for r in self.ropes.values() if r.boundary is not None), default=None)
        self.embedding_scale = plan.embedding_scale
        self.logit_scale = plan.logit_scale
        self.logit_cap = plan.logit_cap

        make_norm = plan.final_norm or (lambda w: RMSNorm.load(w, "model.norm", sizes.hidden, sizes.eps))
        self.norm = make_norm(weights)
        table = weights.matrix(plan.embedding, (sizes.vocab, sizes.hidden))
        self.embedding = Embedding(table, self.norm.weight.dtype)
        ready(self.embedding)
        self.inputs = plan.inputs(weights) if plan.inputs else None
        if self.inputs is not None:
            ready(self.inputs)
        self.blocks: list[AnyBlock] = []
        for layer in range(sizes.layers):
            self.blocks.append(plan.block(weights, layer))
            ready(self.blocks[-1])
        self.head = load_head(weights, sizes.vocab, sizes.hidden)
        ready([self.norm, self.head])
        self.runs = runs(self.blocks, self.embedding.dtype)
        self.joined = kernels_in_use()
        """Whether sums and norms between the parts are one kernel."""
        kinds = {norm is not None for block in self.blocks for norm in (block.norms.after_mixer, block.norms.after_mlp)}
        self.notes = (*plan.notes, *fallback_lines(self.embedding.dtype, sizes.hidden, kinds))

    def rotation(self, length: int) -> tuple[int, ...]:
        return tuple(rope.regime(length) for rope in self.ropes.values())

    def rotations(self, step: Step) -> dict[str, Rotation]:
        """How the rows of a step are rotated, by key of `ropes`."""
        return {name: rope.at(step) for name, rope in self.ropes.items()}

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None, rotations: Mapping[str, Rotation] | None = None) -> mx.array:
        """int32 `[T]` to the last block's states `[T, hidden]`; keys, values and states go to the cache. The last norm is left to `logits`,
        which is asked for few of a prompt's rows, unless it comes with the last sum (`joined`). `rotations` are those of the step, where
        they are known."""
        x = self.embedding(tokens)
        if self.embedding_scale != 1.0:
            x = x * mx.array(self.embedding_scale, x.dtype)
        rotations = rotations or self.rotations(step)
        if self.inputs is None:
            return self.through(x, step, hooks, rotations)
        return self._through_with(self.inputs(tokens, x), x, step, rotations)

    def _through_with(self, inputs: mx.array, x: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> mx.array:
        """`through`, each block with its own of the inputs `[layers, T, n]`."""
        for block, own in zip(self.blocks, inputs, strict=True):
            x = block(x, step, rotations, own)
        return self.norm(x) if self.joined else x

    def through(self, x: mx.array, step: Step, hooks: Hooks | None = None, rotations: Mapping[str, Rotation] | None = None) -> mx.array:
        """Rows `[T, hidden]` through all blocks: `hidden` without the embedding."""
        rotations = rotations or self.rotations(step)
        if hooks is not None:
            from .hooks import run_blocks

            x = run_blocks(x, self.blocks, step, rotations, hooks, self.layers)
            return self.norm(x) if self.joined else x
        if self.joined:
            stream = Stream(x)
            for block in self.blocks:
                stream = block.advance(stream, step, rotations)
            return stream.normed(self.norm)[1]
        for run in self.runs:
            if run.native is not None and step.runs_blocks and not (run.temperatures and run.warm(step)):
                turns = [None if rope is None else rotations[rope] for rope in run.ropes]
                x = step.run_blocks(x, run.native, run.layers, turns)
            else:
                for block in run.blocks:
                    x = block(x, step, rotations)
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` to `[R, vocab]` in float32."""
        norm = None if self.joined else self.norm
        if norm is not None and norm.centring:
            hidden, norm = norm(hidden), None
        y = self.unembed(hidden, norm)
        if self.logit_scale != 1.0:
            y = y * self.logit_scale
        if self.logit_cap is not None:
            y = mx.tanh(y / self.logit_cap) * self.logit_cap
        return y

    def unembed(self, rows: mx.array, norm: RMSNorm | None = None) -> mx.array:
        """`[R, hidden]` through the head alone, after `norm` if it is given: float32 `[R, vocab]`, neither scaled nor capped."""
        return (self.head(rows, norm=norm) if self.head else self.embedding.as_linear(rows, norm=norm)).astype(mx.float32)


def load_head(weights: Weights, vocab: int, hidden: int) -> Linear | None:
    """The output matrix; None if the checkpoint has none and the embedding serves. The tensors decide, not `tie_word_embeddings`: like
    transformers, use a head that exists even if the config ties it."""
    return Linear.load(weights, "lm_head", vocab, hidden) if weights.has("lm_head.weight") else None
