"""Runs one step on the device: lays it out as a flat row of tokens, calls the model, samples. Decides nothing."""

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
from ...models.decoder import Model
from ...sampling import Drafts, KeptNoise, Row, Sampled, SamplingBatch, TokenLogprobs
from ...util.dataclass import dataclass
from ...util.device import is_gpu
from ..core.events import Token
from ..core.scheduler import Schedule, Work
from ..core.sequence import Sequence

if TYPE_CHECKING:
    from ...adapters.adapted_model import AdaptedModel
    from ..core.sequence import Proposed
    from .compiled_step import CompiledSteps


COMPILED_STEPS = "MLXINFER_COMPILED_STEPS"
"""The environment's variable that is 1 where steps are to be replayed (`compiled_step`)."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The rows of a step's `Sampled` that belong to one sequence: one, and one more for each draft."""

    sequence: Sequence
    """Whose they are."""
    row: int
    """The first of them."""
    drafts: Proposed
    """The drafts that the step verifies."""
    past: int = 0
    """Tokens that were computed before the step."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a sequence got from a step."""

    row: SampledRow
    """Where it comes from."""
    tokens: list[int]
    """The tokens that hold: right drafts, and one that was sampled after them."""
    logprobs: list[TokenLogprobs] | None
    """For each of `tokens`; None if no row of the step has any."""
    drafted: int
    """How many drafts were verified."""

    def events(self, count: int) -> list[Token]:
        """The first `count` tokens, with the log-probabilities that the sequence asked for."""
        sequence, wanted = self.row.sequence, self.row.sequence.params.logprobs
        if wanted is None or self.logprobs is None:
            return [Token(sequence, token) for token in self.tokens[:count]]
        pairs = zip(self.tokens[:count], self.logprobs, strict=False)
        return [Token(sequence, token, chosen, top[:wanted]) for token, (chosen, top) in pairs]


@dataclass(slots=True)
class PendingStep:
    """A step that has been submitted and not yet collected."""

    schedule: Schedule
    """What it computes."""
    steps: list[CacheStep]
    """The same, seen from the cache: one for each pass through the model."""
    rows: list[SampledRow]
    """What is sampled."""
    sampled: Sampled | None
    """The tokens, on the device; None if no row is sampled."""
    logits: dict[Sequence, tuple[int, mx.array]]
    """For sequences that are only read: the position of their first row, and all rows' logits, float32 `[count, vocab]`, or what the rows
    are pooled to, float32 `[1, n]`."""
    needs_commit: bool
    """Whether it fills pages: it has to have ended before the next step is submitted, which reads them where they are stored."""
    kept: list[mx.array] = field(default_factory=list)
    """What hooks have kept of it."""
    sealed: bool = False
    """Whether the pages that it fills have been given their places."""
    logits_to_sample: mx.array | None = None
    """`Model.scores` `[R, vocab]` of the rows that are still to be sampled; None once they are."""
    submitted: float = 0.0
    """When, in seconds of `perf_counter`."""
    _awaited: list[mx.array] = field(default_factory=list)

    def send(self) -> None:
        """Start what goes to other machines, before anything that waits for their answer, as the pages of a head do."""
        if sent := [array for step in self.steps for array in step.sent]:
            mx.async_eval(sent)  # type: ignore[no-untyped-call]

    def submit(self) -> None:
        """Start it, without waiting for it."""
        self.submitted = perf_counter()
        arrays = self._arrays()
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        # Kept only where `wait` needs them: MLX writes in place only what nobody else refers to.
        self._awaited = arrays if self.needs_commit else []

    def wait(self) -> None:
        """Until all of a step that fills pages is computed. Returns at once for any other, and the second time."""
        arrays, self._awaited = self._awaited, []
        if arrays:
            mx.eval(arrays)

    def _arrays(self) -> list[mx.array]:
        """All that it leaves behind."""
        found = [array for step in self.steps for array in step.state]
        if self.sampled is not None:
            found += self.sampled.arrays
        found += [rows for _, rows in self.logits.values()]
        if self.logits_to_sample is not None:
            found.append(self.logits_to_sample)
        return found + self.kept

    def collect(self) -> list[SequenceOutput]:
        """Wait for the step, and bring over what it sampled, all at once."""
        if self.sampled is None:
            return []
        tokens, logprobs = self.sampled.read()
        outputs = []
        for row in self.rows:
            first, drafted = row.row, len(row.drafts)
            held = accept(row.drafts, tokens[first : first + drafted + 1]) if drafted else [tokens[first]]
            outputs.append(SequenceOutput(row, held, None if logprobs is None else logprobs[first : first + len(held)], drafted))
        return outputs

    def close(self) -> None:
        """Let go of the cache."""
        for step in self.steps:
            step.close()


def accept(drafts: Proposed, sampled: list[int]) -> list[int]:
    """The tokens that hold: those sampled up to the first that is not what was drafted. Each of them was sampled after tokens that hold,
    with the noise of its own position: what was drafted decides how many there are, never which."""
    proposed = drafts if isinstance(drafts, list) else cast("list[int]", drafts.tolist())
    right = 0
    while right < len(proposed) and proposed[right] == sampled[right]:
        right += 1
    return sampled[: right + 1]


class ModelRunner:
    """Owns the steps of the cache, and tells the sequences how far they have been computed."""

    def __init__(
        self, model: Model, cache: PagedCache, *, apart: bool = False, adapted: AdaptedModel | None = None, replays: bool = True
    ) -> None:
        """`apart`: each sequence goes through the model by itself (`ChunkPolicy.apart`). `adapted`: the model with its adapters. `replays`:
        on a GPU, MLX may replay steps instead of Python building each."""
        self.model = model
        self.cache = cache
        self._apart = apart
        self.adapted = adapted
        self.compiled = None if apart or not replays else _compiled(model, cache)  # what MLX fuses may round differently
        self.noise = None if model.mtp is None or is_gpu() else KeptNoise()
        """The noise that a head's drafts share with the rows that verify them; a GPU draws it and adds it in one kernel."""
        self._batch: SamplingBatch | None = None
        self._batch_rows: list[Sequence] = []
        self._last: tuple[list[Sequence], mx.array] | None = None
        """The sequences of the last step, if each of them got one token and nothing was drafted, and the tokens."""

    @property
    def replays(self) -> bool:
        """Whether steps have been replayed."""
        return self.compiled is not None and self.compiled.replayed > 0

    def submit(self, schedule: Schedule, before: PendingStep | None = None) -> PendingStep:
        """Start a step without waiting for it. `before` is the one that is pending: if it fills pages, the new one is built while it is
        computed, and submitted once it has ended. Pools of pages are written in place only while no step in flight reads them.

        Where an answer is held to a structure only the model runs: what may follow is known once the step before was collected, and then
        `sample` does the rest."""
        work = schedule.work
        tokens = self._tokens(schedule)
        rows = self._sampled_rows(work)
        steps: list[CacheStep] = []
        logits: dict[Sequence, tuple[int, mx.array]] = {}
        sampled_rows: list[mx.array] = []
        start = 0
        kept: list[mx.array] = []
        for part in self._parts(work):
            segments = _segments(part, all_rows=self.model.mtp is not None)
            step = self.cache.begin(segments)
            count = segments[-1].start + segments[-1].count
            hooks = part[0].sequence.hooks
            graph = self.model if self.adapted is None else self._graph(self.adapted, part)
            plain = hooks is None and graph is self.model and len(part) == len(work)
            replayed = _replayed(self.compiled, part, tokens, step) if self.compiled is not None and plain else None
            if replayed is not None:
                sampled_rows.append(replayed)
            else:
                hidden = graph.hidden(tokens if len(part) == len(work) else tokens[start : start + count], step, hooks)
                sampled_rows += self._logits(part, segments, hidden, logits)
                if self.compiled is not None:
                    self.compiled.learn(step)
            steps.append(step)
            start += count
            if hooks is not None:
                kept += hooks.arrays()
        pending = PendingStep(schedule, steps, rows, None, logits, any(step.needs_commit for step in steps), kept=kept)
        if rows:
            pending.logits_to_sample = sampled_rows[0] if len(sampled_rows) == 1 else mx.concatenate(sampled_rows)
        self._last = None
        held = any(row.sequence.constraint is not None for row in rows)
        sampled = None if held else self._sample(pending)
        for w in work:
            w.sequence.advance(w.count - w.drafts)
        if not held:
            self._follow(pending, sampled)
        if before is not None:
            before.wait()
        pending.send()
        self.cache.submit()
        pending.submit()
        return pending

    def _parts(self, work: list[Work]) -> list[list[Work]]:
        """What goes through the model together: neighbours with the same hooks."""
        if self._apart:
            return [[w] for w in work]
        if all(w.sequence.hooks is None for w in work):
            return [work]
        return [list(part) for _, part in groupby(work, key=lambda w: id(w.sequence.hooks))]

    def _graph(self, adapted: AdaptedModel, part: list[Work]) -> Model:
        """The graph that these go through: where none has an adapter, the model's own."""
        if all(w.sequence.adapter is None for w in part):
            return self.model
        return adapted.for_rows([(w.sequence.adapter, w.count) for w in part])

    def sample(self, pending: PendingStep) -> None:
        """Choose the tokens of a step whose answers have taken all tokens before, without waiting for it."""
        sampled = self._sample(pending)
        self._follow(pending, sampled)
        if sampled is not None:
            mx.async_eval(sampled.arrays)  # type: ignore[no-untyped-call]

    def _follow(self, pending: PendingStep, sampled: Sampled | None) -> None:
        """Tell the sequences of a step which tokens they get. Those whose drafts are being verified stand still until `commit`."""
        pending.sampled, pending.logits_to_sample = sampled, None
        if sampled is None:
            return
        for row in pending.rows:
            if not len(row.drafts):
                row.sequence.follow(sampled.tokens, row.row)
        if not pending.schedule.drafts:
            self._last = [row.sequence for row in pending.rows], sampled.tokens

    def commit(self, output: SequenceOutput, taken: int) -> None:
        """Tell a sequence whose drafts were verified how far it is computed, if `taken` of its tokens were taken: states of its layers go
        back to there."""
        row, s = output.row, output.row.sequence
        if not output.drafted or s.slot is None:
            return
        held = max(taken, 1)
        self.cache.verified(s.slot, held)
        s.verify(output.drafted, len(output.tokens) - 1, row.past + held)

    def _sampled_rows(self, work: list[Work]) -> list[SampledRow]:
        rows: list[SampledRow] = []
        row = 0
        for w in work:
            if not w.samples:
                continue
            s = w.sequence
            if w.drafts:
                rows.append(SampledRow(s, row, s.drafts[: w.drafts], s.num_computed_tokens))
            else:
                rows.append(SampledRow(s, row, []))
            row += 1 + w.drafts
        return rows

    def _logits(
        self, work: list[Work], segments: list[Segment], hidden: mx.array, wanted: dict[Sequence, tuple[int, mx.array]]
    ) -> list[mx.array]:
        """Scores of the rows that are sampled, or nothing; what sequences that are only read ask for goes to `wanted`."""
        sampled: list[int] = []
        for w, segment in zip(work, segments, strict=True):
            end = segment.start + segment.count
            if w.samples:
                sampled += range(end - 1 - w.drafts, end)
            elif w.sequence.pooling is not None:
                part = w.sequence.pooling.part(self.model, hidden[segment.start : end], segment.past, w.sequence.num_tokens)
                wanted[w.sequence] = segment.past, part
            elif w.sequence.wants_logits:
                wanted[w.sequence] = segment.past, self.model.logits(hidden[segment.start : end])
        if not sampled:
            return []
        return [self.model.scores(hidden if len(sampled) == hidden.shape[0] else hidden[mx.array(sampled)])]

    def _tokens(self, schedule: Schedule) -> mx.array:
        """int32 `[T]`. A token that only the device knows yet is taken from there."""
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
            known += s.tokens[s.num_computed_tokens : s.num_computed_tokens + w.count - w.drafts]
            for part in (s.pending_token, s.drafts[: w.drafts] if w.drafts else None):
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
        rows, logits = pending.rows, pending.logits_to_sample
        if logits is None:
            return None
        sequences = [row.sequence for row in rows]
        if self._batch is None or sequences != self._batch_rows:
            described = [Row(s.params, s.seed, s.prompt, s.answer, s.pending_token) for s in sequences]
            self._batch = SamplingBatch(described, logits.shape[-1], self.noise.take if self.noise else None)
            self._batch_rows = sequences
        if self._batch.counts_tokens:
            self._batch.catch_up([s.tokens for s in sequences])
        drafts = None
        if pending.schedule.drafts:
            drafts = Drafts([len(row.drafts) for row in rows], _joined([row.drafts for row in rows]))
        return self._batch.sample(logits, [s.num_tokens for s in sequences], drafts, _allowed_tokens(rows, logits.shape[-1]))


def _compiled(model: Model, cache: PagedCache) -> CompiledSteps | None:
    """What replays steps, where that was asked for: its modules take a while to import."""
    if os.environ.get(COMPILED_STEPS) != "1":
        return None
    from .compiled_step import CompiledSteps

    return CompiledSteps.of(model, cache)


def _replayed(compiled: CompiledSteps, work: list[Work], tokens: mx.array, step: CacheStep) -> mx.array | None:
    """The scores of all rows, if a compiled step computes them."""
    return compiled.scores(tokens, step) if all(w.count == 1 and w.samples and not w.drafts for w in work) else None


def _segments(work: list[Work], *, all_rows: bool) -> list[Segment]:
    """`all_rows`: the model reads every row once more, whether it is sampled or not."""
    segments = []
    start = 0
    for w in work:
        s = w.sequence
        assert s.slot is not None
        past = s.num_computed_tokens
        whole = all_rows or s.wants_logits or s.pooling is not None
        read = w.count if whole else 1 + w.drafts if w.samples else 0
        segments.append(Segment(s.slot, start, w.count, past, max(s.rope_length, past + w.count), w.drafts, read))
        start += w.count
    return segments


def _allowed_tokens(rows: list[SampledRow], vocab_size: int) -> mx.array | None:
    """Bits of the tokens that each row may take, uint32 `[R, ceil(vocab / 32)]`, lowest first; None where no row is held to anything."""
    bits = [_bits(row) for row in rows]
    if all(each is None for each in bits):
        return None
    words = (vocab_size + 31) // 32
    free = [np.full((1 + len(row.drafts), words), -1, np.int32) if each is None else each for row, each in zip(rows, bits, strict=True)]
    # Not as a NumPy array: a Ctrl-C that falls into that conversion is lost.
    return mx.array(memoryview(np.concatenate(free).view(np.uint32)))  # type: ignore[arg-type]


def _bits(row: SampledRow) -> np.ndarray | None:
    s = row.sequence
    if s.constraint is None or s.finish_reason is not None:
        return None
    assert isinstance(row.drafts, list)
    return s.constraint.rows(row.drafts)


def _joined(drafts: list[Proposed]) -> mx.array:
    # Not by way of numpy: a Ctrl-C that falls into that conversion is lost.
    parts = [mx.array(d, dtype=mx.uint32) if isinstance(d, list) else d for d in drafts if len(d)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
