"""Decoder of all families: embedding, a stack of blocks, a norm and an output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import mlx.core as mx

from .. import kernels_cpu
from ..cache.base import LayerSpec, Rotation, Step
from ..errors import UnsupportedModelError
from ..kernels_metal.kernel_trial import kernels_in_use
from ..nn import routes
from ..nn.linear import Embedding, Linear
from ..nn.mrope import MRope
from ..nn.norms import RMSNorm
from ..nn.packing import objects
from ..nn.residual_stream import ResidualStream, fallback_lines
from ..nn.rope import Rope
from ..nn.weights import Weights
from ..util.dataclass import dataclass
from .block import AnyBlock, with_deepstack
from .common import Sizes
from .heads.mtp import AnyHead, DraftScores, Head, HeadPlan, with_vocabulary
from .native.fused_blocks import Run, runs
from .native.head import native_head
from .pipeline_stage import NextStages, Stage, layers_of, only, side_by_side

if TYPE_CHECKING:
    from .hooks import Hooks


class Model(Protocol):
    """Causal language model over a flat row of tokens. It has weights only; all state is in the cache."""

    model_type: str
    vocab_size: int
    max_context: int
    """Maximum number of positions."""
    layers: tuple[LayerSpec, ...]
    """Cache spec of each layer."""
    recompute_at: int | None
    """Length beyond which all rotations differ (longrope), so that the engine recomputes the sequence; None without one."""
    mrope: bool
    """True if rotary positions have three axes (M-RoPE): images then need `Segment.rope`, and later tokens `Segment.shift`."""
    notes: tuple[str, ...]
    """Messages for the user at load time."""
    mtp: AnyHead | None
    """Draft head, if loaded; its layers are the last of `layers`."""

    def rotation(self, length: int) -> tuple[int, ...]:
        """Return a key that is equal for all lengths with the same rotations."""
        ...

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None) -> mx.array:
        """Map int32 `[T]` to the last hidden states `[T, hidden]` for `logits`, and append keys and values to the cache."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Map `[R, hidden]` to `[R, vocab]`, float32, with the model's scaling and cap."""
        ...

    def scores(self, hidden: mx.array) -> mx.array:
        """Return `logits`, perhaps in a narrower dtype with all of their digits, which suffices for greedy sampling."""
        ...

    def draft(self, tokens: mx.array, before: mx.array, step: Step) -> tuple[mx.array, DraftScores]:
        """Run the draft head once: tokens int32 `[R]` and the hidden rows before them `[R, hidden]` to the next rows and their scores."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """Contents of a config."""

    sizes: Sizes
    """Counts and widths."""
    specs: tuple[LayerSpec, ...]
    """Cache spec of each layer."""
    ropes: Mapping[str, Rope]
    """Ropes by the key in `Block.rope`."""
    block: Callable[[Weights, int], AnyBlock]
    """`block(weights, layer)` requests the tensors of one block."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Cap c: logits become `c * tanh(logits / c)`."""
    final_norm: Callable[[Weights], RMSNorm] | None = None
    """Loads the last norm; None for an RMS norm at `model.norm`."""
    embedding: str = "model.embed_tokens.weight"
    """Name of the embedding's tensor."""
    inputs: Callable[[Weights], LayerInputs] | None = None
    """Loads the per-layer inputs of families that have them."""
    notes: tuple[str, ...] = field(default=())
    """Messages for the user at load time."""
    mtp: HeadPlan | None = None
    """Draft head that the checkpoint may have."""


@runtime_checkable
class LayerInputs(Protocol):
    """Computes a separate input for each block."""

    @property
    def width(self) -> int:
        """Columns of an input."""
        ...

    @property
    def given_token(self) -> int:
        """Token whose inputs the rows of `GivenRows` take: that of padding."""
        ...

    def __call__(self, tokens: mx.array, x: mx.array) -> mx.array:
        """Map int32 `[T]` and their embeddings `[T, hidden]` to `[layers, T, n]`."""
        ...


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Last norm and output matrix."""

    norm: RMSNorm
    head: Linear | None
    """`[vocab, hidden]`; None for tied embeddings."""


def keep_lazy(node: object) -> None:
    """Leave a finished part unevaluated: the default of `ready`."""


class BlockStack:
    """Consecutive blocks and their ropes. `layers` has an entry per layer of the whole model, `Elsewhere` for layers of other blocks."""

    def __init__(
        self, plan: Architecture, weights: Weights, dtype: mx.Dtype, ready: Callable[[object], None], part: Stage | None = None
    ) -> None:
        """Load the blocks of `part` (default: all) for rows of `dtype`; `ready` is called with each block."""
        self.part = part or Stage(0, plan.sizes.layers)
        self.hidden_size = plan.sizes.hidden
        self.ropes = dict(plan.ropes)
        self.blocks: list[AnyBlock] = []
        for layer in range(self.part.first, self.part.last):
            self.blocks.append(plan.block(weights, layer))
            ready(self.blocks[-1])
        self.layers: tuple[LayerSpec, ...] = plan.specs if part is None or part.shares > 1 else only(plan.specs, layers_of(self.blocks))
        self.depth = plan.sizes.layers
        """Number of blocks of the whole model."""
        self.tap(plan.mtp.taps if plan.mtp else (), dtype)
        self.joined = kernels_in_use()
        """True if residual sums and norms are fused kernels."""
        self.rest: NextStages | None = None
        """Blocks after these on other machines, or None."""
        self.spread: NextStages | None = None
        """Sends the embedded rows to the machines with the other shards of these blocks, or None."""

    def tap(self, taps: Sequence[int], dtype: mx.Dtype) -> None:
        """Record the rows, of `dtype`, that enter these blocks, counted from the first of the stack."""
        self.taps = tuple(taps)
        """See `mtp.AnyHead.taps`."""
        self.runs = runs(self.blocks, dtype, self.taps)
        self._dtype = dtype
        self._deep_runs: tuple[list[Run], list[Run]] | None = None
        """`runs`, and these runs cut where steps with images add rows; made for the first such step."""

    def drop_runs(self) -> None:
        """Drop compiled blocks, which hold their matrices. `rebuild_runs` makes them again."""
        self.runs, self._deep_runs = [], None

    def rebuild_runs(self) -> None:
        """Compile the blocks again, after matrices were replaced. A draft head keeps its own."""
        self.tap(self.taps, self._dtype)

    @property
    def divided(self) -> bool:
        """True if other machines compute a part of each step."""
        return self.rest is not None or self.spread is not None

    def rotations(self, step: Step) -> dict[str, Rotation]:
        """Return the rotations of a step's rows by key of `ropes`."""
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
        """Run rows `[T, hidden]` through these blocks and append keys, values and states to the cache.

        `inputs` `[blocks, T, n]` are the per-layer inputs of families that have them. Rows at `taps` are appended to `tapped`, except with
        hooks. `GivenRows.deepstack` is added after the first blocks.
        """
        if self.joined and hooks is None:
            return self.stream(x, step, rotations, inputs, tapped).sum()
        if hooks is not None and inputs is None:
            from .hooks import run_blocks

            return run_blocks(x, self.blocks, step, rotations, hooks, self.layers)
        given: mx.array | None = None
        first = 0
        deepstack = step.given.deepstack if step.given is not None else ()
        for run in self._runs_between(len(deepstack)) if deepstack else self.runs:
            native = native_form(run, step) if hooks is None else None
            if native is not None:
                x = with_deepstack(x, step, first - 1) if deepstack else x
                if tapped is not None:
                    self._tap(first, x, tapped)
                if inputs is not None and given is None:
                    given = inputs.swapaxes(0, 1).reshape(x.shape[0], -1)
                turns = [None if rope is None else rotations[rope] for rope in run.ropes]
                x = step.run_blocks(x, native, run.layers, turns, run.recurrent, given)
            else:
                for index, block in enumerate(run.blocks, first):
                    x = with_deepstack(x, step, index - 1) if deepstack else x
                    if tapped is not None:
                        self._tap(index, x, tapped)
                    x = block(x, step, rotations, None if inputs is None else inputs[index])
            first += len(run.blocks)
        return with_deepstack(x, step, first - 1) if deepstack else x

    def _runs_between(self, count: int) -> list[Run]:
        """Return `runs` for steps that add rows after each of the first `count` blocks."""
        if all(run.native is None for run in self.runs):
            return self.runs
        if self._deep_runs is None or self._deep_runs[0] is not self.runs:
            self._deep_runs = self.runs, runs(self.blocks, self._dtype, [*self.taps, *range(1, count + 1)])
        return self._deep_runs[1]

    def stream(
        self,
        x: mx.array,
        step: Step,
        rotations: Mapping[str, Rotation],
        inputs: mx.array | None = None,
        tapped: list[mx.array] | None = None,
    ) -> ResidualStream:
        """Run rows with fused sums and norms; the last sum is left to the norm after it. The arguments are those of `advance`."""
        stream = ResidualStream(x)
        deepstack = 0 if step.given is None else len(step.given.deepstack)
        # Indexing would gather; parts of a split are views.
        owns = [None] * len(self.blocks) if inputs is None else [own.squeeze(0) for own in mx.split(inputs, len(self.blocks))]
        for index, (block, own) in enumerate(zip(self.blocks, owns, strict=True)):
            if tapped is not None and index in self.taps:
                stream = ResidualStream(stream.sum())
                tapped.append(stream.x)
            stream = block.advance(stream, step, rotations, own)
            if index < deepstack:
                stream = ResidualStream(with_deepstack(stream.sum(), step, index))
        return stream

    def _tap(self, index: int, x: mx.array, tapped: list[mx.array]) -> None:
        if index in self.taps:
            tapped.append(x)


def native_form(run: Run, step: Step) -> kernels_cpu.Blocks | None:
    """Return the CPU kernels' form of these blocks, or None if they cannot run this step.

    They support neither temperatures nor states that a rejected draft rolls back.
    """
    if run.native is None or not step.runs_blocks or any(t.beyond(step.segments) for t in run.temperatures):
        return None
    return None if run.recurrent and any(s.drafts for s in step.segments) else run.native


class Decoder(BlockStack):
    """Causal language model on a flat row of tokens; implements `Model`."""

    def __init__(
        self,
        model_type: str,
        plan: Architecture,
        weights: Weights,
        ready: Callable[[object], None] = keep_lazy,
        part: Stage | None = None,
    ) -> None:
        """Load a model; `ready` is called with each part once its tensors were requested.

        A loader evaluates the part there (`nn.packing.settle`), which frees the sources of joined projections before the next block. With a
        `part`, only its blocks are loaded and `rest` runs the others.
        """
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
        self.mrope = any(isinstance(rope, MRope) for rope in self.ropes.values())
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
        kinds = {(norm is not None, True) for block in self.blocks for norm in (block.norms.after_mixer, block.norms.after_mlp)}
        kinds |= {(True, False) for block in self.blocks if block.norms.adds_alone}
        dtype = self.embedding.dtype
        chosen = routes.fallback_lines(objects(self.blocks), dtype) if self.joined else ()
        self.notes = (*plan.notes, *fallback_lines(dtype, sizes.hidden, kinds), *chosen)

    def _load_head(self, plan: HeadPlan, weights: Weights, architecture: Architecture) -> AnyHead:
        head = plan.load(weights, plan.places(len(architecture.specs)))
        if plan.vocabulary is None or not isinstance(head, Head):
            return head
        name = "lm_head.weight" if self.head else architecture.embedding
        return with_vocabulary(head, weights, name, plan.vocabulary, self.vocab_size)

    def rotation(self, length: int) -> tuple[int, ...]:
        return tuple(rope.regime(length) for rope in self.ropes.values())

    def hidden(self, tokens: mx.array, step: Step, hooks: Hooks | None = None, rotations: Mapping[str, Rotation] | None = None) -> mx.array:
        """Map int32 `[T]` to the last block's states `[T, hidden]`, and append keys, values and states to the cache.

        `logits` applies the last norm, because a prompt needs few rows, unless it is fused with the last sum (`joined`). `rotations` are
        those of the step, if known.
        """
        x, named = self._embedded(tokens), tokens
        if step.given is not None:
            if len(step.given.deepstack) > len(self.blocks):
                raise UnsupportedModelError(f"images need the first {len(step.given.deepstack)} blocks of this model on the first machine")
            x[step.given.rows] = step.given.features.astype(x.dtype)
            if self.inputs is not None:
                named = mx.array(tokens)  # a new reference, so that assignment does not change `tokens`
                named[step.given.rows] = self.inputs.given_token
        rotations = rotations or self.rotations(step)
        inputs = None if self.inputs is None else self.inputs(named, x)
        if self.mtp is None:
            return self._through(x, step, rotations, hooks, inputs)[1]
        found: list[mx.array] = []
        before, after = self._through(x, step, rotations, hooks, inputs, found if self.taps and hooks is None else None)
        if self.taps and hooks is not None:  # hooks exclude drafts
            found = [mx.zeros_like(before)] * len(self.taps)
        reads = after if self.mtp.normed and self.joined else self.norm(before) if self.mtp.normed else before
        self.mtp.follow(self._for_head(tokens, x), mx.concatenate(found, axis=-1) if found else reads, step, rotations)
        return after

    def through(self, x: mx.array, step: Step, hooks: Hooks | None = None) -> mx.array:
        """Run rows `[T, hidden]` through all blocks: `hidden` without the embedding."""
        return self._through(x, step, self.rotations(step), hooks)[1]

    def draft(self, tokens: mx.array, before: mx.array, step: Step) -> tuple[mx.array, DraftScores]:
        """Map `[R]` and `[R, hidden]` to the head's rows `[R, hidden]` and its scores."""
        head = self.mtp
        assert head is not None
        rotations = {key: self.ropes[key].at(step) for key in head.ropes}
        rows, finished = head.draft(self._for_head(tokens), before, step, rotations)
        return rows, head.scores(finished, self)

    def _for_head(self, tokens: mx.array, x: mx.array | None = None) -> mx.array:
        """Return embeddings for the head; `x` are the model's, if known."""
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
        """Return (last block's rows, rows of `hidden`). `inputs` `[layers, T, n]` are per-layer inputs; rows at `taps` go to `tapped`."""
        if self.spread is not None:
            x = self.spread(x, step, inputs)
        own = None if inputs is None else inputs[self.part.first : self.part.last]
        if self.joined and hooks is None and self.rest is None:
            before, after = self.stream(x, step, rotations, own, tapped).normed(self.norm)
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
        """Return rows `[R, hidden]` of `hidden` after the last norm, which embedding models pool."""
        return hidden if self.joined else self.norm(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        """Map `[R, hidden]` to `[R, vocab]` in float32."""
        return self.scores(hidden).astype(mx.float32)

    def scores(self, hidden: mx.array) -> mx.array:
        """Return logits in the dtype of the output product; in float32 if the model scales or caps them."""
        norm = None if self.joined else self.norm
        if norm is not None and norm.centring:
            hidden, norm = norm(hidden), None
        y = self._product(hidden, norm)
        return y if self.logit_scale == 1.0 and self.logit_cap is None else self.scaled(y.astype(mx.float32))

    def scaled(self, y: mx.array) -> mx.array:
        """Apply the model's scaling and cap to logits `[R, vocab]`, float32."""
        if self.logit_scale != 1.0:
            y = y * self.logit_scale
        if self.logit_cap is not None:
            y = mx.tanh(y / self.logit_cap) * self.logit_cap
        return y

    def unembed(self, rows: mx.array, norm: RMSNorm | None = None) -> mx.array:
        """Multiply `[R, hidden]`, after `norm` if given, by the output matrix: float32 `[R, vocab]`, neither scaled nor capped."""
        return self._product(rows, norm).astype(mx.float32)

    def _product(self, rows: mx.array, norm: RMSNorm | None) -> mx.array:
        return self.head(rows, norm=norm) if self.head else self.embedding.as_linear(rows, norm=norm)


def load_head(weights: Weights, vocab: int, hidden: int) -> Linear | None:
    """Load the output matrix; None for tied embeddings. An existing tensor is used even with `tie_word_embeddings`, as in transformers."""
    return Linear.load(weights, "lm_head", vocab, hidden) if weights.has("lm_head.weight") else None
