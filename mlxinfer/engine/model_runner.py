"""Runs one step on the device: lays it out as a flat row of tokens, calls the model, samples. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Union, cast

import mlx.core as mx

from ..cache.base import Segment
from ..cache.paged import PagedCache
from ..cache.step import CacheStep
from ..models.decoder import Model
from ..sampling import Drafts, Row, Sampled, SamplingBatch, TokenLogprobs
from .scheduler import Work
from .sequence import Sequence

Proposed = Union[list[int], mx.array]
"""Drafts of one sequence: on the host, or on the device only."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The rows of a step's `Sampled` that belong to one sequence: one, and one more for each draft."""

    sequence: Sequence
    row: int
    drafts: Proposed
    state: list[mx.array] = field(default_factory=list)
    """Of its recurrent layers, as they were before the drafts."""
    past: int = 0
    """Tokens that were computed before the step."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a sequence got from a step: the tokens that hold, the last of them not a draft; and log-probabilities if any row has them."""

    draw: SampledRow
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    drafted: int


@dataclass(slots=True)
class PendingStep:
    """A step that has been submitted and not yet read."""

    work: list[Work]
    steps: list[CacheStep]
    draws: list[SampledRow]
    sampled: Sampled | None
    logits: dict[Sequence, tuple[int, mx.array]]
    """Of the sequences that want them: the position of their first row, and all rows' logits, `[count, vocab]`."""
    launched: float = field(default_factory=perf_counter)
    rows: int = field(init=False)
    decode_rows: int = field(init=False)
    drafted: bool = field(init=False)
    needs_commit: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rows = sum([w.count for w in self.work])
        self.decode_rows = sum([w.count for w in self.work if w.decodes])
        self.drafted = any(w.drafts for w in self.work)
        self.needs_commit = any(step.needs_commit for step in self.steps)

    @property
    def state(self) -> list[mx.array]:
        return [array for step in self.steps for array in step.state]

    def read(self) -> list[SequenceOutput]:
        """Wait for the step, and bring over what it sampled, all at once."""
        if self.sampled is None:
            return []
        tokens, logprobs = self.sampled.read()
        drawn = []
        for draw in self.draws:
            drafts = _on_host(draw.drafts)
            first, last = draw.row, draw.row + len(drafts) + 1
            held = accept(drafts, tokens[first:last])
            drawn.append(SequenceOutput(draw, held, None if logprobs is None else logprobs[first : first + len(held)], len(drafts)))
        return drawn


def accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """The tokens that hold: those sampled up to the first that is not what was drafted. Each of them was sampled behind tokens that hold,
    with the noise of its own position: what was drafted decides how many there are, never which."""
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return sampled[: right + 1]


class ModelRunner:
    """Owns the cache's steps; the sequences' counters are advanced here, as a step is submitted and as it is read."""

    def __init__(self, model: Model, cache: PagedCache, *, deterministic: bool = False) -> None:
        """`deterministic`: each sequence goes through the model by itself, so that its rows are computed in the same shapes whatever else
        runs."""
        self._deterministic = deterministic
        self.model = model
        self.cache = cache
        self._batch: SamplingBatch | None = None
        self._batch_rows: list[Sequence] = []
        self._last: tuple[list[Sequence], mx.array] | None = None

    def launch(self, work: list[Work]) -> PendingStep:
        """Submit a step without waiting for it."""
        tokens = self._tokens(work)
        draws = list(self._draws(work))
        steps: list[CacheStep] = []
        logits: dict[Sequence, tuple[int, mx.array]] = {}
        sampled_rows: list[mx.array] = []
        start = 0
        for part in [[w] for w in work] if self._deterministic else [work]:
            count = sum(w.count for w in part)
            step = self.cache.begin(_segments(part))
            hidden = self.model.hidden(tokens[start : start + count] if count < tokens.shape[0] else tokens, step)
            logits.update(self._wanted_logits(part, step, hidden))
            sampled_rows += self._rows_to_sample(part, step, hidden)
            steps.append(step)
            start += count
        sampled = self._sample(draws, sampled_rows[0] if len(sampled_rows) == 1 else mx.concatenate(sampled_rows)) if draws else None
        _advance(work, draws, sampled)
        plain = sampled is not None and not any(len(d.drafts) for d in draws)
        self._last = ([d.sequence for d in draws], sampled.tokens) if sampled is not None and plain else None
        flight = PendingStep(work, steps, draws, sampled, logits)
        mx.async_eval(  # type: ignore[no-untyped-call]
            flight.state, [rows for _, rows in logits.values()], [] if sampled is None else sampled.arrays, [d.state for d in draws]
        )
        return flight

    def _wanted_logits(self, work: list[Work], step: CacheStep, hidden: mx.array) -> dict[Sequence, tuple[int, mx.array]]:
        return {
            w.sequence: (segment.past, self.model.logits(hidden[segment.start : segment.start + segment.count]))
            for w, segment in zip(work, step.segments, strict=True)
            if w.sequence.wants_logits
        }

    def _rows_to_sample(self, work: list[Work], step: CacheStep, hidden: mx.array) -> list[mx.array]:
        """Logits of the rows that are sampled from, or nothing."""
        rows = [r for s, w in zip(step.segments, work, strict=True) if w.samples for r in range(s.start + s.count)[-1 - w.drafts :]]
        if not rows:
            return []
        return [self.model.logits(hidden if len(rows) == hidden.shape[0] else hidden[mx.array(rows)])]

    def settle(self, drawn: SequenceOutput, taken: int) -> None:
        """Set the counters of a sequence whose drafts have been verified, and of whose tokens so many were taken. Where its layers keep
        states, these go back to where the step began, unless all of it holds, and what holds is computed again."""
        s = drawn.draw.sequence
        if not drawn.drafted or s.slot is None:
            return
        s.num_tokens += taken
        if drawn.draw.state and taken <= drawn.drafted:
            self.cache.restore(s.slot, drawn.draw.state)
            s.num_computed_tokens = drawn.draw.past
        else:
            s.num_computed_tokens += max(taken - 1, 0)

    def _draws(self, work: list[Work]) -> Iterator[SampledRow]:
        row = 0
        for w in work:
            if w.samples:
                s = w.sequence
                assert s.slot is not None
                yield SampledRow(s, row, s.drafts[: w.drafts], self.cache.state(s.slot) if w.drafts else [], s.num_computed_tokens)
                row += 1 + w.drafts

    def _tokens(self, work: list[Work]) -> mx.array:
        """int32 `[T]`. A token that only the device knows yet is taken from there."""
        if self._last is not None and [w.sequence for w in work] == self._last[0] and all(_is_next_token(w) for w in work):
            return self._last[1].astype(mx.int32)
        pieces: list[mx.array] = []
        known: list[int] = []
        for w in work:
            s = w.sequence
            parts: list[Proposed] = [s.tokens[s.num_computed_tokens : s.num_computed_tokens + w.count - w.drafts]]
            if s.pending_token is not None:
                parts.append(s.pending_token)
            if w.drafts:
                parts.append(s.drafts[: w.drafts])
            for part in parts:
                if isinstance(part, list):
                    known += part
                    continue
                if known:
                    pieces.append(mx.array(known, dtype=mx.int32))
                    known = []
                pieces.append(part.astype(mx.int32))
        if known:
            pieces.append(mx.array(known, dtype=mx.int32))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _sample(self, draws: list[SampledRow], logits: mx.array) -> Sampled:
        rows = [d.sequence for d in draws]
        if self._batch is None or rows != self._batch_rows:
            described = [Row(s.params, s.seed, s.prompt, s.answer, s.pending_token) for s in rows]
            self._batch = SamplingBatch(described, logits.shape[-1])
            self._batch_rows = rows
        self._batch.catch_up([s.tokens for s in rows])
        counts = [len(d.drafts) for d in draws]
        drafts = Drafts(counts, _joined([d.drafts for d in draws])) if any(counts) else None
        return self._batch.sample(logits, [s.num_tokens for s in rows], drafts)


def _segments(work: list[Work]) -> list[Segment]:
    segments = []
    start = 0
    for w in work:
        s = w.sequence
        assert s.slot is not None
        end = s.num_computed_tokens + w.count
        segments.append(Segment(s.slot, start, w.count, s.num_computed_tokens, max(s.total, end)))
        start += w.count
    return segments


def _advance(work: list[Work], draws: list[SampledRow], sampled: Sampled | None) -> None:
    """A sequence whose drafts are being verified stands still until they are: `ModelRunner.settle`."""
    for w in work:
        w.sequence.num_computed_tokens += w.count - w.drafts
        w.sequence.pending_token = None
        w.sequence.drafts = []
    for draw in draws:
        if not len(draw.drafts):
            assert sampled is not None
            draw.sequence.num_tokens += 1
            draw.sequence.pending_token = sampled.tokens[draw.row : draw.row + 1]


def _is_next_token(work: Work) -> bool:
    return work.sequence.pending_token is not None and not work.drafts


def _on_host(drafts: Proposed) -> list[int]:
    return drafts if isinstance(drafts, list) else cast("list[int]", drafts.tolist())


def _joined(drafts: list[Proposed]) -> mx.array:
    # Not by way of numpy: a Ctrl-C that falls into that conversion is lost.
    parts = [mx.array(d, dtype=mx.uint32) if isinstance(d, list) else d for d in drafts if len(d)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
