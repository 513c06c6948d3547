"""The skeleton shared by all families: embedding, a stack of blocks, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import mlx.core as mx

from .. import kernels_cpu
from ..cache.base import LayerSpec, Rotation, Step
from ..nn.kernel_trial import kernels_in_use
from ..nn.linear import Embedding, Linear
from ..nn.norms import RMSNorm
from ..nn.residual_stream import Stream, fallback_lines
from ..nn.rope import Rope
from ..nn.weights import Weights
from ..util.dataclass import dataclass
from .block import AnyBlock
from .common import Sizes
from .heads.mtp import AnyHead, Head, HeadPlan, Scores, with_vocabulary
from .native.fused_blocks import Run, runs
from .native.head import native_head
from .pipeline_stage import Part, Rest, layers_of, only, side_by_side

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
    mtp: AnyHead | None
    """The head that drafts from the model's hidden rows, if it was loaded; its layers are the last of `layers`."""

    def rotation(self, length: int) -> tuple[int, ...]:
        """Equal for all lengths at which a sequence's tokens are rotated in the same way."""
        ...

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None) -> mx.array:
        """int32 `[T]` to the last layer's states `[T, hidden]` as `logits` takes them, keys and values appended to the cache."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` to `[R, vocab]`, float32, with the model's own scaling and cap."""
        ...

    def scores(self, hidden: mx.array) -> mx.array:
        """`logits`, maybe in a narrower dtype that has all of their digits: whoever takes the highest needs no other."""
        ...

    def draft(self, tokens: mx.array, before: mx.array, step: Step) -> tuple[mx.array, Scores]:
        """A step of `mtp` alone: int32 `[R]` and the hidden rows of the tokens before them, `[R, hidden]`, to the rows that take their
        place for the next tokens, `[R, hidden]`, and scores of these."""
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
    mtp: HeadPlan | None = None
    """The head that predicts several tokens, where the checkpoint may have one."""


@runtime_checkable
class LayerInputs(Protocol):
    """Makes an input for each block."""

    @property
    def width(self) -> int:
        """Columns of such an input."""
        ...

    def __call__(self, tokens: mx.array, x: mx.array) -> mx.array:
        """int32 `[T]` and their embeddings `[T, hidden]` to `[layers, T, n]`."""
        ...


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Last norm and head, after the last block."""

    norm: RMSNorm
    """The last norm, weight `[hidden]`."""
    head: Linear | None
    """`[vocab, hidden]`; None where the embedding serves."""


def keep_lazy(node: object) -> None:
    """Leave a finished part of the model unevaluated: the default of `Decoder`'s `ready`."""


class BlockStack:
    """Consecutive blocks and their ropes. `layers` has an entry for every layer of the whole model; those of other blocks are
    `Elsewhere`."""

    def __init__(
        self, plan: Architecture, weights: Weights, dtype: mx.Dtype, ready: Callable[[object], None], part: Part | None = None
    ) -> None:
        """`dtype` is that of the rows; `ready` is called with each block. Without a `part` it has all blocks."""
        self.part = part or Part(0, plan.sizes.layers)
        self.hidden_size = plan.sizes.hidden
        self.ropes = dict(plan.ropes)
        self.blocks: list[AnyBlock] = []
        for layer in range(self.part.first, self.part.last):
            self.blocks.append(plan.block(weights, layer))
            ready(self.blocks[-1])
        self.layers: tuple[LayerSpec, ...] = plan.specs if part is None or part.shares > 1 else only(plan.specs, layers_of(self.blocks))
        self.depth = plan.sizes.layers
        """Blocks of the whole model."""
        self.tap(plan.mtp.taps if plan.mtp else (), dtype)
        self.joined = kernels_in_use()
        """Whether sums and norms between the parts are one kernel."""
        self.rest: Rest | None = None
        """The blocks that come after these, where they are on other machines."""
        self.spread: Rest | None = None
        """Gives the rows that come from the embedding to the machines that have the other shares of these blocks."""

    def tap(self, taps: Sequence[int], dtype: mx.Dtype) -> None:
        """Let the rows, of this dtype, be read where they enter these blocks, counted from the first of the stack."""
        self.taps = tuple(taps)
        """Where a head reads the rows, as `mtp.AnyHead.taps`."""
        self.runs = runs(self.blocks, dtype, self.taps)

    @property
    def divided(self) -> bool:
        """Whether other machines compute a part of each step."""
        return self.rest is not None or self.spread is not None

    def rotations(self, step: Step) -> dict[str, Rotation]:
        """How the rows of a step are rotated, by key of `ropes`."""
        return {name: rope.at(step) for name, rope in self.ropes.items()}

    def advance(
        self,
        x: mx.array,
        step: Step,
        rotations: Mapping[str, Rotation],
        hooks: Hooks | None = None,
        inputs: mx.array | None = None,
        tapped: list[mx.array] | None = None,
    ) -> mx.array:
        """Rows `[T, hidden]` through these blocks; keys, values and states go to the cache. `inputs` `[blocks, T, n]` are those of each
        block, for families that have such. The rows at `taps` within are added to `tapped`, except with hooks."""
        if self.joined and hooks is None and inputs is None:
            return self.stream(x, step, rotations, tapped).sum()
        if hooks is not None and inputs is None:
            from .hooks import run_blocks

            return run_blocks(x, self.blocks, step, rotations, hooks, self.layers)
        given: mx.array | None = None
        first = 0
        for run in self.runs:
            native = native_form(run, step) if hooks is None else None
            if native is not None:
                if tapped is not None:
                    self._tap(first, x, tapped)
                if inputs is not None and given is None:
                    given = inputs.swapaxes(0, 1).reshape(x.shape[0], -1)
                turns = [None if rope is None else rotations[rope] for rope in run.ropes]
                x = step.run_blocks(x, native, run.layers, turns, run.recurrent, given)
            else:
                for index, block in enumerate(run.blocks, first):
                    if tapped is not None:
                        self._tap(index, x, tapped)
                    x = block(x, step, rotations, None if inputs is None else inputs[index])
            first += len(run.blocks)
        return x

    def stream(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], tapped: list[mx.array] | None = None) -> Stream:
        """The same where sums and norms are `joined`: the last sum is left to the norm that follows."""
        stream = Stream(x)
        for index, block in enumerate(self.blocks):
            if tapped is not None and index in self.taps:
                stream = Stream(stream.sum())
                tapped.append(stream.x)
            stream = block.advance(stream, step, rotations)
        return stream

    def _tap(self, index: int, x: mx.array, tapped: list[mx.array]) -> None:
        if index in self.taps:
            tapped.append(x)


def native_form(run: Run, step: Step) -> kernels_cpu.Blocks | None:
    """What the CPU kernels compute of these blocks, if they can do it for this step: no temperature changes anything in it, and states need
    not be kept for drafts that may be taken back."""
    if run.native is None or not step.runs_blocks or any(t.beyond(step.segments) for t in run.temperatures):
        return None
    return None if run.recurrent and any(s.drafts for s in step.segments) else run.native


class Decoder(BlockStack):
    """A causal language model on a flat row of tokens; implements `Model`."""

    def __init__(
        self,
        model_type: str,
        plan: Architecture,
        weights: Weights,
        ready: Callable[[object], None] = keep_lazy,
        part: Part | None = None,
    ) -> None:
        """`ready` is called with each part once its tensors were asked for; a loader evaluates it there (`nn.packing.settle`), so that the
        sources of joined projections are freed before the next block is read. With a `part`, only its blocks are loaded: others are
        called through `rest`."""
        sizes, head = plan.sizes, plan.mtp
        self.model_type = model_type
        self.vocab_size = sizes.vocab
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
        super().__init__(plan, weights, self.embedding.dtype, ready, part)
        self.max_context = max((rope.context for rope in self.ropes.values()), default=sizes.positions)
        if head is not None:
            self.layers += head.specs(sizes.hidden)
            self.ropes.update(head.ropes)
        self.recompute_at = min((r.boundary for r in self.ropes.values() if r.boundary is not None), default=None)
        self.head = load_head(weights, sizes.vocab, sizes.hidden)
        ready(OutputLayer(self.norm, self.head))
        self.mtp = self._load_head(head, weights, plan) if head else None
        if self.mtp is not None:
            ready(self.mtp)
        if isinstance(self.mtp, Head):
            self.mtp = replace(self.mtp, native=native_head(self.mtp, self.layers, self.embedding.dtype))
        kinds = {norm is not None for block in self.blocks for norm in (block.norms.after_mixer, block.norms.after_mlp)}
        self.notes = (*plan.notes, *fallback_lines(self.embedding.dtype, sizes.hidden, kinds))

    def _load_head(self, plan: HeadPlan, weights: Weights, architecture: Architecture) -> AnyHead:
        head = plan.load(weights, plan.places(len(architecture.specs)))
        if plan.vocabulary is None or not isinstance(head, Head):
            return head
        name = "lm_head.weight" if self.head else architecture.embedding
        return with_vocabulary(head, weights, name, plan.vocabulary, self.vocab_size)

    def rotation(self, length: int) -> tuple[int, ...]:
        return tuple(rope.regime(length) for rope in self.ropes.values())

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None, rotations: Mapping[str, Rotation] | None = None) -> mx.array:
        """int32 `[T]` to the last block's states `[T, hidden]`; keys, values and states go to the cache. The last norm is left to `logits`,
        which is asked for few of a prompt's rows, unless it comes with the last sum (`joined`). `rotations` are those of the step, where
        they are known."""
        x = self._embedded(tokens)
        rotations = rotations or self.rotations(step)
        inputs = None if self.inputs is None else self.inputs(tokens, x)
        if self.mtp is None:
            return self._through(x, step, rotations, hooks, inputs)[1]
        found: list[mx.array] = []
        before, after = self._through(x, step, rotations, hooks, inputs, found if self.taps and hooks is None else None)
        if self.taps and hooks is not None:  # what hooks change is not drafted for
            found = [mx.zeros_like(before)] * len(self.taps)
        reads = after if self.mtp.normed and self.joined else self.norm(before) if self.mtp.normed else before
        self.mtp.follow(self._for_head(tokens, x), mx.concatenate(found, axis=-1) if found else reads, step, rotations)
        return after

    def through(self, x: mx.array, step: Step, hooks: Hooks | None = None) -> mx.array:
        """Rows `[T, hidden]` through all blocks: `hidden` without the embedding."""
        return self._through(x, step, self.rotations(step), hooks)[1]

    def draft(self, tokens: mx.array, before: mx.array, step: Step) -> tuple[mx.array, Scores]:
        """`[R]` and `[R, hidden]` to the head's rows `[R, hidden]` and its scores."""
        head = self.mtp
        assert head is not None
        rotations = {key: self.ropes[key].at(step) for key in head.ropes}
        rows, finished = head.draft(self._for_head(tokens), before, step, rotations)
        return rows, head.scores(finished, self)

    def _for_head(self, tokens: mx.array, x: mx.array | None = None) -> mx.array:
        """Embeddings as the head reads them; `x` are the model's, where they are known."""
        head = self.mtp
        assert head is not None
        if head.embedding is not None:
            return head.embedding(tokens)
        if not head.scales_embeddings and self.embedding_scale != 1.0:
            return self.embedding(tokens)
        return self._embedded(tokens) if x is None else x

    def _embedded(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        return x if self.embedding_scale == 1.0 else x * mx.array(self.embedding_scale, x.dtype)

    def _through(
        self,
        x: mx.array,
        step: Step,
        rotations: Mapping[str, Rotation],
        hooks: Hooks | None,
        inputs: mx.array | None = None,
        tapped: list[mx.array] | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The last block's rows, and `hidden`'s. `inputs` `[layers, T, n]` are those of each block, for families that have such. The rows
        at `taps` are added to `tapped`."""
        if self.spread is not None:
            x = self.spread(x, step, inputs)
        own = None if inputs is None else inputs[self.part.first : self.part.last]
        if self.joined and hooks is None and own is None and self.rest is None:
            before, after = self.stream(x, step, rotations, tapped).normed(self.norm)
        else:
            before = self.advance(x, step, rotations, hooks, own, tapped)
            if self.rest is not None:
                before, *between = side_by_side(self.rest(before, step, inputs), x.shape[1])
                if tapped is not None:
                    tapped += between
            after = self.norm(before) if self.joined else before
        if tapped is not None:
            self._tap(self.depth, before, tapped)
        return before, after

    def normed(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]`, as `hidden` returns it, after the last norm: what embedding models pool."""
        return hidden if self.joined else self.norm(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` to `[R, vocab]` in float32."""
        return self.scores(hidden).astype(mx.float32)

    def scores(self, hidden: mx.array) -> mx.array:
        """`logits` as the product with the head leaves them; in float32 where the model scales or caps them."""
        norm = None if self.joined else self.norm
        if norm is not None and norm.centring:
            hidden, norm = norm(hidden), None
        y = self._product(hidden, norm)
        return y if self.logit_scale == 1.0 and self.logit_cap is None else self.scaled(y.astype(mx.float32))

    def scaled(self, y: mx.array) -> mx.array:
        """Logits `[R, vocab]`, float32, with the model's own scaling and cap."""
        if self.logit_scale != 1.0:
            y = y * self.logit_scale
        if self.logit_cap is not None:
            y = mx.tanh(y / self.logit_cap) * self.logit_cap
        return y

    def unembed(self, rows: mx.array, norm: RMSNorm | None = None) -> mx.array:
        """`[R, hidden]` through the head alone, after `norm` if it is given: float32 `[R, vocab]`, neither scaled nor capped."""
        return self._product(rows, norm).astype(mx.float32)

    def _product(self, rows: mx.array, norm: RMSNorm | None) -> mx.array:
        return self.head(rows, norm=norm) if self.head else self.embedding.as_linear(rows, norm=norm)


def load_head(weights: Weights, vocab: int, hidden: int) -> Linear | None:
    """The output matrix; None if the checkpoint has none and the embedding serves. The tensors decide, not `tie_word_embeddings`: like
    transformers, use a head that exists even if the config ties it."""
    return Linear.load(weights, "lm_head", vocab, hidden) if weights.has("lm_head.weight") else None
