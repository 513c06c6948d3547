"""Runs one step on the device: lays it out as a flat row of tokens, calls the model, samples. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..cache.base import Segment
from ..cache.paged import PagedCache
from ..cache.step import CacheStep
from ..models.base import Model
from ..sampling import Row, Sampled, SamplingBatch
from .scheduler import Work
from .sequence import Sequence


@dataclass(slots=True)
class Flight:
    """A step that has been submitted and not yet read."""

    work: list[Work]
    step: CacheStep
    sampling: list[Sequence]
    sampled: Sampled | None
    logits: dict[Sequence, mx.array]
    """All rows' logits, `[count, vocab]`, of the sequences that want them."""


class Runner:
    """Owns the cache's steps; the sequences' counters are advanced here, as a step is submitted."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self.model = model
        self.cache = cache
        self._batch: SamplingBatch | None = None
        self._batch_rows: list[Sequence] = []
        self._last: tuple[list[Sequence], mx.array] | None = None

    def launch(self, work: list[Work]) -> Flight:
        """Submit a step without waiting for it."""
        sampling = [w.sequence for w in work if w.samples]
        tokens = self._tokens(work)
        step = self.cache.begin(_segments(work))
        hidden = self.model.hidden(tokens, step)
        logits = {}
        sampled = None
        for w, segment in zip(work, step.segments, strict=True):
            if w.sequence.wants_logits:
                logits[w.sequence] = self.model.logits(hidden[segment.start : segment.start + segment.count])
        if sampling:
            last = [s.start + s.count - 1 for s, w in zip(step.segments, work, strict=True) if w.samples]
            chosen = hidden if len(last) == hidden.shape[0] else hidden[mx.array(last)]
            sampled = self._sample(sampling, self.model.logits(chosen))
        _advance(work, sampling, sampled)
        self._last = None if sampled is None else (sampling, sampled.tokens)
        mx.async_eval(  # type: ignore[no-untyped-call]
            step.state, list(logits.values()), [] if sampled is None else sampled.arrays
        )
        return Flight(work, step, sampling, sampled, logits)

    def _tokens(self, work: list[Work]) -> mx.array:
        """int32 `[T]`. A token that only the device knows yet is taken from there."""
        if self._last is not None and [w.sequence for w in work] == self._last[0] and all(w.sequence.unread is not None for w in work):
            return self._last[1].astype(mx.int32)
        pieces: list[mx.array] = []
        known: list[int] = []
        for w in work:
            s = w.sequence
            if s.unread is None:
                known += s.tokens[s.num_computed : s.num_computed + w.count]
                continue
            if known:
                pieces.append(mx.array(known, dtype=mx.int32))
                known = []
            pieces.append(s.unread.astype(mx.int32))
        if known:
            pieces.append(mx.array(known, dtype=mx.int32))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _sample(self, rows: list[Sequence], logits: mx.array) -> Sampled:
        if self._batch is None or rows != self._batch_rows:
            described = [Row(s.params, s.seed, s.prompt, s.answer, s.unread) for s in rows]
            self._batch = SamplingBatch(described, logits.shape[-1])
            self._batch_rows = rows
        return self._batch.sample(logits, [s.num_tokens for s in rows])


def _segments(work: list[Work]) -> list[Segment]:
    segments = []
    start = 0
    for w in work:
        s = w.sequence
        assert s.slot is not None
        end = s.num_computed + w.count
        segments.append(Segment(s.slot, start, w.count, s.num_computed, max(s.total, end)))
        start += w.count
    return segments


def _advance(work: list[Work], sampling: list[Sequence], sampled: Sampled | None) -> None:
    for w in work:
        w.sequence.num_computed += w.count
        w.sequence.unread = None
    for i, sequence in enumerate(sampling):
        assert sampled is not None
        sequence.num_tokens += 1
        sequence.unread = sampled.tokens[i : i + 1]
