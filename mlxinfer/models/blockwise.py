"""Runs texts through a model block by block: all texts pass a block before the next one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from ..cache.base import AttentionSpec, Rotation, Segment
from ..cache.paged import PagedCache
from ..cache.step import CacheStep
from ..errors import UnsupportedModelError
from ..nn.linear import Embedding
from ..nn.packing import holders, settle
from ..nn.weights import Dense
from ..util.device import clear_cache
from .block import AnyBlock
from .decoder import Architecture, LayerInputs, OutputLayer
from .pipeline_stage import layers_of, only

BATCH = 4096
"""Tokens that pass a block at once; a longer text passes whole."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts that pass a block together."""

    texts: list[Sequence[int]]
    """Token ids of each text."""
    held_out: bool = False
    """True if the texts are kept for validation."""

    @property
    def tokens(self) -> list[int]:
        """Token ids of all texts, concatenated."""
        return [token for text in self.texts for token in text]


def batches(texts: Sequence[Sequence[int]], *, held_out: int = 0, size: int = BATCH) -> list[Batch]:
    """Return the texts in order, in batches of about `size` tokens; the last `held_out` texts form separate batches."""
    found: list[Batch] = []
    for number, text in enumerate(texts):
        aside = number >= len(texts) - held_out
        if not found or found[-1].held_out != aside or len(found[-1].tokens) + len(text) > size:
            found.append(Batch([], aside))
        found[-1].texts.append(text)
    return found


class BlockReader:
    """Receives the parts of a model as they are built (`build(config, weights, ready=reader)`) and runs all texts through each.

    Memory has one block, the `states` of the texts, and the pages that later blocks share. Subclasses add work before, between and after
    the parts. An unknown kind of part raises `UnsupportedModelError`; no part is skipped.
    """

    def __init__(self, plan: Architecture, texts: Sequence[Batch], dtype: mx.Dtype) -> None:
        """Create a reader for the model of `plan`, with activations of `dtype`."""
        self.plan, self.texts, self.dtype = plan, texts, dtype
        self.states: list[mx.array] = []
        """Rows `[tokens, hidden]` of each batch that enter the next block."""
        self.parts = 0
        self.parts_done = 0
        """Number of parts that the states passed in an earlier run."""
        self._inputs: list[list[mx.array]] | None = None
        """Per batch, further inputs of the remaining blocks; None if the family has none."""
        self._kept: dict[int, list[CacheStep]] = {}
        """Steps of all batches by layer, for layers whose pages later blocks share."""

    def __call__(self, part: object) -> None:
        """Run all texts through the next part."""
        read = self._runner_of(part)
        self.parts += 1
        self.check(part)
        if self.parts > self.parts_done:
            self.prepare(part)
            read()
            self.finish(part)
        clear_cache()

    def check(self, part: object) -> None:
        """Handle every part, including parts of an earlier run."""

    def prepare(self, part: object) -> None:
        """Evaluate a part before texts pass it."""
        settle(part)

    def start_batch(self, batch: Batch) -> None:
        """Handle a batch before it passes a block."""

    def finish(self, part: object) -> None:
        """Drop the matrices of a block after all texts passed it."""
        if not isinstance(part, (Embedding, OutputLayer)):
            drop(part)

    @property
    def states_suffice(self) -> bool:
        """True if a block needs only the states of earlier blocks."""
        return self.plan.inputs is None and not any(isinstance(spec, AttentionSpec) and spec.shared for spec in self.plan.specs)

    def _runner_of(self, part: object) -> Callable[[], None]:
        """Return the function that runs the texts through a part of this kind."""
        if isinstance(part, Embedding):
            return partial(self._embed, part)
        if isinstance(part, AnyBlock):
            return partial(self._pass, part)
        if isinstance(part, LayerInputs):
            return partial(self._compute_inputs, part)
        if isinstance(part, OutputLayer):
            return self._end
        raise UnsupportedModelError(
            f"this model has a {type(part).__name__}, which cannot be read block by block: give more memory, "
            "or convert with the encoder minmax and without a comparison, which read no text"
        )

    def _embed(self, embedding: Embedding) -> None:
        rows = embedding(mx.array([token for batch in self.texts for token in batch.tokens], mx.int32))
        if self.plan.embedding_scale != 1.0:
            rows = rows * mx.array(self.plan.embedding_scale, rows.dtype)
        ends = np.cumsum([len(batch.tokens) for batch in self.texts])[:-1]
        self.states = [*mx.split(rows, ends.tolist())]
        mx.eval(self.states)

    def _compute_inputs(self, inputs: LayerInputs) -> None:
        """Compute each block's own input."""
        self._inputs = []
        for batch, states in zip(self.texts, self.states, strict=True):
            self.start_batch(batch)
            self._inputs.append(list(inputs(mx.array(batch.tokens, mx.int32), states)))
            mx.eval(self._inputs[-1])

    def _pass(self, block: AnyBlock) -> None:
        steps = self._steps(block)
        for number, batch in enumerate(self.texts):
            self.start_batch(batch)
            step = steps[number] if steps else self._step(batch)
            rotations: dict[str, Rotation] = {name: rope.at(step) for name, rope in self.plan.ropes.items()}
            own = self._inputs[number].pop(0) if self._inputs else None
            self.states[number] = block(self.states[number], step, rotations, own)
            mx.eval(self.states[number], step.state if steps else [])
            step.full.clear()

    def _end(self) -> None:
        """Do nothing: subclasses handle the last norm and the head."""

    def _steps(self, block: AnyBlock) -> list[CacheStep] | None:
        """Return the steps of all batches for a block with shared pages; None for other blocks."""
        shared = {layer for layer in layers_of([block]) if _is_shared(self.plan, layer)}
        if not shared:
            return None
        (layer,) = shared
        if layer not in self._kept:
            self._kept[layer] = [self._step(batch, shared) for batch in self.texts]
        return self._kept[layer]

    def _step(self, batch: Batch, layers: set[int] | None = None) -> CacheStep:
        """Return a step over these texts with an empty cache of the given layers."""
        specs = self.plan.specs if layers is None else only(self.plan.specs, layers)
        lengths = [len(text) for text in batch.texts]
        pages = sum(lengths) + 64 * len(lengths)
        cache = PagedCache(specs, dtype=self.dtype, kv_cache_tokens=pages, chunk=max(lengths))
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        return cache.begin([Segment(cache.open(), start, count, 0, count) for start, count in zip(starts, lengths, strict=True)])


def _is_shared(plan: Architecture, layer: int) -> bool:
    spec = plan.specs[layer]
    return isinstance(spec, AttentionSpec) and spec.shared


def drop(part: object) -> None:
    """Drop the matrices of a part."""
    for holder in list(holders(part)):
        holder.matrix = Dense(mx.zeros((1, 1)))
    clear_cache()
