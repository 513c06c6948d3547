"""Runs one step on the device: lays it out as a flat row of tokens, calls the model, samples. It makes no choices."""

from __future__ import annotations

import os
from dataclasses import field
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from ...cache.base import Segment
from ...cache.paged import PagedCache
from ...cache.step import CacheStep
from ...kernels_metal.kernel_trial import kernels_in_use
from ...models.decoder import Model
from ...sampling import Drafts, KeptNoise, Sampled, SamplingBatch
from ...util.dataclass import dataclass
from ...util.device import is_gpu
from ..core.schedule import Schedule, ScheduledSequence
from ..core.sequence import Sequence

if TYPE_CHECKING:
    from ...adapters.adapted_model import AdaptedModel
    from ...loading.repack_cache.pooled_experts import PooledExperts
    from ..core.feature_cache import FeatureCache
    from ..core.sequence import Proposed
    from .compiled_step import CompiledSteps
    from .image_rows import ImageRows, PartOfPrompt
    from .replay_check import ReplayCheck


COMPILED_STEPS = "MLXINFER_COMPILED_STEPS"
"""Environment variable, 0 to build all steps, 1 to replay compiled steps (`compiled_step`) without comparing them first."""


@dataclass(slots=True)
class PendingStep:
    """A step that has been submitted and not yet collected."""

    schedule: Schedule
    sampled_sequences: list[ScheduledSequence]
    """Those whose rows are sampled, in the order of their rows."""
    needs_commit: bool = False
    """True if it fills pages. It must then end before the next step is submitted, which reads the pages where they are stored."""
    passes: list[CacheStep] = field(default_factory=list)
    """The step in the cache: one for each pass through the model."""
    read: list[ScheduledSequence] = field(default_factory=list)
    """Those that are only read: their `output` holds logits or pooled rows."""
    kept: list[mx.array] = field(default_factory=list)
    """Arrays that hooks keep, and comparisons of replayed steps."""
    sampled: Sampled | None = None
    """The sampled tokens, on the device; None if no row is sampled yet."""
    logits_to_sample: mx.array | None = None
    """`Model.scores` `[R, vocab]` of rows that are not sampled yet; None once they are."""
    sealed: bool = False
    """True once the pages that it fills have their places."""
    submitted: float = 0.0
    """Time of submission, in seconds of `perf_counter`."""
    _awaited: list[mx.array] = field(default_factory=list)

    def send(self) -> None:
        """Start sending to other machines, before anything that waits for their answer, such as the pages of a head."""
        if sent := [array for step in self.passes for array in step.sent]:
            mx.async_eval(sent)  # type: ignore[no-untyped-call]

    def submit(self) -> None:
        """Start it without waiting for it."""
        self.submitted = perf_counter()
        arrays = [array for step in self.passes for array in step.state]
        if self.sampled is not None:
            arrays += self.sampled.arrays
        if self.logits_to_sample is not None:
            arrays.append(self.logits_to_sample)
        arrays += [w.output for w in self.read if w.output is not None]
        arrays += self.kept
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        # Kept only for `wait`: MLX writes an array in place only while nothing else refers to it.
        self._awaited = arrays if self.needs_commit else []

    def start(self, before: PendingStep | None) -> None:
        """Start the passes so far. Plain MLX may copy open pages in the next one, and earlier passes write these in place."""
        if before is not None:
            before.wait()
        self.send()
        mx.async_eval([array for step in self.passes for array in step.state])  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until a step that fills pages is computed. Returns at once for any other step, and when called again."""
        arrays, self._awaited = self._awaited, []
        if arrays:
            mx.eval(arrays)

    def collect(self) -> list[ScheduledSequence]:
        """Wait for the step and set the new tokens of its sampled sequences, which are returned."""
        if self.sampled is None:
            return []
        tokens, logprobs = self.sampled.read()
        for w in self.sampled_sequences:
            first, end = w.first_row, w.first_row + 1 + w.num_drafts
            w.new_tokens = accept(w.proposed, tokens[first:end]) if w.num_drafts else [tokens[first]]
            w.logprobs = None if logprobs is None else logprobs[first : first + len(w.new_tokens)]
        return self.sampled_sequences

    def close(self) -> None:
        """Drop references to the cache."""
        for step in self.passes:
            step.close()


def accept(drafts: Proposed, sampled: list[int]) -> list[int]:
    """The sampled tokens up to and including the first that differs from its draft.

    Each was sampled after accepted tokens, with the noise of its own position. Drafts decide how many tokens there are, never which."""
    proposed = drafts if isinstance(drafts, list) else cast("list[int]", drafts.tolist())
    right = 0
    while right < len(proposed) and proposed[right] == sampled[right]:
        right += 1
    return sampled[: right + 1]


class ModelRunner:
    """Owns the steps of the cache, and advances the sequences."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        *,
        apart: bool = False,
        adapted: AdaptedModel | None = None,
        replays: bool = True,
        check: ReplayCheck | None = None,
        features: FeatureCache | None = None,
        experts: PooledExperts | None = None,
    ) -> None:
        """`apart`: each sequence goes through the model alone (`ChunkPolicy.apart`). `adapted`: the model with its adapters. `replays`: on
        a GPU, MLX may replay steps that Python would build otherwise, once `check` trusts them. `features`: of the images that sequences
        may have. `experts`: pools of the model's experts."""
        self.model = model
        self.cache = cache
        self._apart = apart
        self.adapted = adapted
        self._images = None if features is None else _image_rows(features)
        self._reads_back = experts is not None and not experts.store.is_complete
        """True if building a step may compute the first part of it, to read the chosen experts."""
        # Fused operations may round differently.
        self.compiled = None if apart or self._reads_back or not replays else _compiled(model, cache, check)
        self.noise = None if model.mtp is None or is_gpu() else KeptNoise()
        """Noise that a head's drafts share with the rows that verify them; None on a GPU, where one kernel draws and adds it."""
        self._batch: SamplingBatch | None = None
        self._batch_sequences: list[Sequence] = []
        self._last: tuple[list[Sequence], mx.array] | None = None
        """(sequences, tokens) of the last step, if each sequence got one token and nothing was drafted."""

    @property
    def replays(self) -> bool:
        """True if steps have been replayed, or compared with replayed ones."""
        return self.compiled is not None and self.compiled.replayed + self.compiled.checked > 0

    def submit(self, schedule: Schedule, before: PendingStep | None = None) -> PendingStep:
        """Start a step without waiting for it. `before` is the pending step. If that fills pages, the new one is built meanwhile and
        submitted once it has ended: pools of pages are written in place only while no step in flight reads them.

        If an answer has a constraint, only the model runs. The allowed tokens are known once the step before was collected, and `sample`
        then does the rest."""
        work = schedule.work
        if self._reads_back:
            if before is not None:
                before.wait()
            self.cache.submit()
        tokens = self._tokens(schedule)
        pending = PendingStep(schedule, _sampled_sequences(work))
        scores = self._run_model(pending, tokens, before)
        if scores:
            pending.logits_to_sample = scores[0] if len(scores) == 1 else mx.concatenate(scores)
        self._last = None
        constrained = [w for w in pending.sampled_sequences if w.sequence.constraint is not None]
        sampled = None if constrained else self._sample(pending)
        for w in work:
            w.sequence.advance(w.count - w.num_drafts)
        if not constrained:
            self._follow(pending, sampled)
        if before is not None:
            before.wait()
        pending.send()
        self.cache.submit()
        pending.submit()
        return pending

    def _run_model(self, pending: PendingStep, tokens: mx.array, before: PendingStep | None) -> list[mx.array]:
        """The model's scores of the rows to sample. Sequences that are only read get their output."""
        work = pending.schedule.work
        scores: list[mx.array] = []
        start = 0
        for group in self._groups(work):
            segments, pictured = _segments(group, self._images, all_rows=self.model.mtp is not None)
            step = self.cache.begin(segments)
            if pictured and self._images is not None:
                if pending.passes and any(segment.spans for segment in segments):
                    pending.start(before)
                step.given = self._images.given(pictured)
            count = segments[-1].start + segments[-1].count
            hooks = group[0].sequence.hooks
            graph = self.model if self.adapted is None else self._graph(self.adapted, group)
            plain = hooks is None and graph is self.model and len(group) == len(work) and step.given is None
            replayed = _replayed(self.compiled, group, tokens, step) if self.compiled is not None and plain else None
            if replayed is not None:
                scores.append(replayed)
            else:
                hidden = graph.hidden(tokens if len(group) == len(work) else tokens[start : start + count], step, hooks)
                if self._reads_back and len(group) < len(work):
                    mx.async_eval(hidden)  # type: ignore[no-untyped-call]  # the next group's experts replace those of the last layer
                built = self._scores(pending, group, segments, hidden)
                scores += built
                if self.compiled is not None:
                    pending.kept += self.compiled.built(step, built)
            pending.passes.append(step)
            pending.needs_commit |= step.needs_commit
            start += count
            if hooks is not None:
                pending.kept += hooks.arrays()
        return scores

    def _groups(self, work: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
        """Neighbours with the same hooks, which go through the model together."""
        if self._apart:
            return [[w] for w in work]
        hooks = work[0].sequence.hooks
        if not [w for w in work if w.sequence.hooks is not hooks]:
            return [work]
        return [list(group) for _, group in groupby(work, key=lambda w: id(w.sequence.hooks))]

    def _graph(self, adapted: AdaptedModel, group: list[ScheduledSequence]) -> Model:
        """The graph for these sequences: the model itself unless one has an adapter."""
        if all(w.sequence.adapter is None for w in group):
            return self.model
        return adapted.for_rows([(w.sequence.adapter, w.count) for w in group])

    def sample(self, pending: PendingStep) -> None:
        """Sample a step whose answers have all earlier tokens, without waiting for it."""
        sampled = self._sample(pending)
        self._follow(pending, sampled)
        if sampled is not None:
            mx.async_eval(sampled.arrays)  # type: ignore[no-untyped-call]

    def _follow(self, pending: PendingStep, sampled: Sampled | None) -> None:
        """Let sequences follow their sampled tokens. Those whose drafts are verified wait for `Sequence.append`."""
        pending.sampled, pending.logits_to_sample = sampled, None
        if sampled is None:
            return
        for w in pending.sampled_sequences:
            if not w.num_drafts:
                w.sequence.follow(sampled.tokens, w.first_row)
        if not pending.schedule.drafts:
            self._last = [w.sequence for w in pending.sampled_sequences], sampled.tokens

    def _scores(self, pending: PendingStep, group: list[ScheduledSequence], segments: list[Segment], hidden: mx.array) -> list[mx.array]:
        """Scores of the rows that are sampled, if there are any. Sequences that are only read get their output."""
        sampled: list[int] = []
        for w, segment in zip(group, segments, strict=True):
            s, end = w.sequence, segment.start + segment.count
            if w.samples:
                sampled += range(end - 1 - w.num_drafts, end)
            elif s.is_only_read:
                w.past, rows = segment.past, hidden[segment.start : end]
                w.output = self.model.logits(rows) if s.pooling is None else s.pooling.part(self.model, rows, w.past, s.num_tokens)
                pending.read.append(w)
        if not sampled:
            return []
        return [self.model.scores(hidden if len(sampled) == hidden.shape[0] else hidden[mx.array(sampled)])]

    def _tokens(self, schedule: Schedule) -> mx.array:
        """The step's tokens, int32 `[T]`; those that only the device knows are taken from there."""
        work = schedule.work
        if self._last is not None and not schedule.drafts:
            sampled, tokens = self._last
            follow = [w.sequence for w in work if w.sequence.awaited_token is not None]
            if len(follow) == len(work) and follow == sampled:
                return tokens.astype(mx.int32)
        pieces: list[mx.array] = []
        known: list[int] = []
        for w in work:
            s = w.sequence
            ids = s.tokens[s.num_computed_tokens : s.num_computed_tokens + w.count - w.num_drafts]
            if s.images is not None and self._images is not None and s.num_computed_tokens < len(s.prompt):
                ids = self._images.ids(s.images, ids, s.num_computed_tokens)
            known += ids
            for part in (s.pending_token, s.drafts[: w.num_drafts] if w.num_drafts else None):
                if isinstance(part, list):
                    known += part
                elif part is not None:
                    pieces += [mx.array(known, dtype=mx.int32)] if known else []
                    pieces.append(part.astype(mx.int32))
                    known = []
        if known:
            pieces.append(mx.array(known, dtype=mx.int32))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _sample(self, pending: PendingStep) -> Sampled | None:
        rows, logits = pending.sampled_sequences, pending.logits_to_sample
        if logits is None:
            return None
        sequences = [w.sequence for w in rows]
        if self._batch is None or sequences != self._batch_sequences:
            self._batch = SamplingBatch(sequences, logits.shape[-1], self.noise.take if self.noise else None)
            self._batch_sequences = sequences
        if self._batch.counts_tokens:
            self._batch.catch_up([s.tokens for s in sequences])
        drafts = None
        if pending.schedule.drafts:
            drafts = Drafts([w.num_drafts for w in rows], _concatenated([w.proposed for w in rows]))
        constrained = [s for s in sequences if s.constraint is not None]
        allowed = _allowed_tokens(rows, logits.shape[-1]) if constrained else None
        return self._batch.sample(logits, [s.num_tokens for s in sequences], drafts, allowed)


def _sampled_sequences(work: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Those that are sampled, with their drafts and their places among the sampled rows."""
    found = []
    row = 0
    for w in work:
        if w.samples:
            w.first_row = row
            row += 1 + w.num_drafts
            if w.num_drafts:
                w.proposed = w.sequence.drafts[: w.num_drafts]
            found.append(w)
    return found


def _image_rows(features: FeatureCache) -> ImageRows:
    from .image_rows import ImageRows  # only for models that see

    return ImageRows(features)


def _compiled(model: Model, cache: PagedCache, check: ReplayCheck | None) -> CompiledSteps | None:
    """Compiled steps where kernels are used, unless the environment forbids them: their modules take a while to import."""
    switch = os.environ.get(COMPILED_STEPS)
    if switch == "0" or not kernels_in_use():
        return None
    from .compiled_step import CompiledSteps
    from .replay_check import ReplayCheck

    return CompiledSteps.of(model, cache, None if switch == "1" else check or ReplayCheck())


def _replayed(compiled: CompiledSteps, work: list[ScheduledSequence], tokens: mx.array, step: CacheStep) -> mx.array | None:
    """Scores of all rows from a compiled step, or None."""
    return compiled.scores(tokens, step) if all(w.count == 1 and w.samples and not w.num_drafts for w in work) else None


def _segments(work: list[ScheduledSequence], images: ImageRows | None, *, all_rows: bool) -> tuple[list[Segment], list[PartOfPrompt]]:
    """Also returns the segments that may have image rows. `all_rows`: the model reads every row again, sampled or not."""
    segments: list[Segment] = []
    pictured: list[PartOfPrompt] = []
    start = 0
    for w in work:
        s = w.sequence
        assert s.slot is not None
        past = s.num_computed_tokens
        whole = all_rows or s.is_only_read
        read = w.count if whole else 1 + w.num_drafts if w.samples else 0
        if s.images is None or images is None:
            segments.append(Segment(s.slot, start, w.count, past, max(s.rope_length, past + w.count), w.num_drafts, read))
        else:
            segments.append(images.segment(w, start, read))
            if past < len(s.prompt):
                pictured.append((s.images, segments[-1]))
        start += w.count
    return segments, pictured


def _allowed_tokens(rows: list[ScheduledSequence], vocab_size: int) -> mx.array | None:
    """Bits of the tokens that each row may take, uint32 `[R, ceil(vocab / 32)]`, lowest first; None if no row is constrained."""
    bits = [_allowed_bits(w) for w in rows]
    if all(each is None for each in bits):
        return None
    words = (vocab_size + 31) // 32
    free = [np.full((1 + w.num_drafts, words), -1, np.int32) if each is None else each for w, each in zip(rows, bits, strict=True)]
    # Not as a NumPy array: a Ctrl-C during that conversion is lost.
    return mx.array(memoryview(np.concatenate(free).view(np.uint32)))  # type: ignore[arg-type]


def _allowed_bits(w: ScheduledSequence) -> np.ndarray | None:
    s = w.sequence
    if s.constraint is None or s.finish_reason is not None:
        return None
    assert isinstance(w.proposed, list)
    return s.constraint.rows(w.proposed)


def _concatenated(drafts: list[Proposed]) -> mx.array:
    # Not by way of NumPy: a Ctrl-C during that conversion is lost.
    parts = [mx.array(d, dtype=mx.uint32) if isinstance(d, list) else d for d in drafts if len(d)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
