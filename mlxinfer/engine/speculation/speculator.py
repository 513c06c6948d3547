"""Which sequences get how many drafts in the next step, and what was learnt from the last one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from ...cache.base import PAGE
from .lengths import Account, Foresight, RoundTimes, best_lengths
from .ngram import NgramIndex

if TYPE_CHECKING:
    from ..runner import Drawn, Flight
    from ..sequence import Sequence

_WORTH = 1.05
"""Gain from which a step is made to wait for the one before it."""
_AT_ONCE = 512
"""Tokens of a prompt that are indexed between two steps."""


@dataclass(slots=True)
class _Past:
    index: NgramIndex
    foresight: Foresight = field(default_factory=Foresight)


class Speculator:
    """Proposes drafts from what a sequence has said before. The engine asks `promising` before it submits a step ahead of time; lands what
    is in flight if so; then `propose` fills `Sequence.drafts`. It tells `landed` of every step and `forget` of every sequence that leaves.
    """

    def __init__(self, max_draft: int, *, boundary: int | None = None) -> None:
        """`max_draft` is for each sequence and step; `boundary` is `Model.recompute_at`."""
        self.max_draft = max_draft
        self.boundary = boundary
        self.times = RoundTimes()
        self.account = Account()
        self._pasts: dict[Sequence, _Past] = {}
        self._landed_at = 0.0
        self._waits = False
        self._waited = 0.0

    def promising(self, running: Iterable[Sequence]) -> bool:
        """Whether the step in flight should be read before the next one: drafts are likely to follow what it gives. Only tokens that have
        been read already are looked at, so that sequences which never repeat themselves run as fast as without."""
        if not self.max_draft:
            return False
        chances, rows = [], 0
        for s in running:
            if not s.remaining:
                continue
            rows += 1
            past = self._follow(s)
            if past is None or s.unread is None or not past.index.run:
                continue
            room = self._room(s, s.num_tokens)
            # The first of these is in flight: it is no draft, but drafts are of use only if it is as foretold.
            found = past.foresight.chances(past.index.run, room + 1)
            if room:
                chances.append(found[1:])
        if not chances or not self.account.open:
            return False
        self._waits = best_lengths(chances, rows, self.times)[1] > _WORTH
        return self._waits

    def propose(self, running: Iterable[Sequence]) -> None:
        """Fill `drafts` of the sequences whose last token has been read, if that pays."""
        if not self.max_draft:
            return
        if self._waits:
            self._waits, self._waited = False, perf_counter()
        candidates, chances, rows = [], [], 0
        for s in running:
            s.drafts = []
            if not s.remaining:
                continue
            rows += 1
            past = self._follow(s)
            if past is None or s.unread is not None or not past.index.run:
                continue
            room = self._room(s, s.num_tokens)
            if room:
                candidates.append((s, past.index))
                chances.append(past.foresight.chances(past.index.run, room))
        if not candidates or not self.account.open:
            return
        lengths, _ = best_lengths(chances, rows, self.times)
        for (s, index), count in zip(candidates, lengths, strict=True):
            if count:
                s.drafts = index.continuation(count)

    def landed(self, flight: Flight, drawn: Iterable[Drawn], now: float) -> None:
        """Learn from a step that has been read; before its tokens are appended or after."""
        drained = flight.launched >= self._landed_at
        # Waiting for somebody to read the answer is not part of a step.
        seconds = now - max(self._landed_at, flight.launched - 0.002)
        self._landed_at = now
        got = list(drawn)
        drafted = sum(d.drafted for d in got)
        for d in got:
            d.draw.sequence.drafted += d.drafted
            d.draw.sequence.accepted += min(len(d.tokens) - 1, d.drafted)
        if flight.rows != len(got) + drafted or not got:
            return
        self.times.observe(flight.rows, seconds, drained=drained)
        waited = 0 < self._waited <= flight.launched
        if waited:
            self._waited = 0.0
        if drafted or waited:
            tokens = sum(len(d.tokens) for d in got)
            self.account.round(seconds, (self.times.step(len(got)) or seconds) * tokens / len(got))
        else:
            self.account.plain(seconds)

    def forget(self, sequence: Sequence) -> None:
        self._pasts.pop(sequence, None)

    def _follow(self, s: Sequence) -> _Past | None:
        """The index of an answer that is being written, with all tokens read so far; None while it is not up to date."""
        if len(s.tokens) <= len(s.prompt) or s.wants_logits or s.followers or s.one_by_one:
            return None
        past = self._pasts.get(s)
        if past is None:
            past = self._pasts[s] = _Past(NgramIndex(s.tokens, s.limit))
        index = past.index
        if index.missing > self.max_draft + 2:
            index.extend(_AT_ONCE)
            return None
        while index.missing:
            run = index.run
            right = index.add()
            if right is not None:
                past.foresight.learn(run, right)
        return past

    def _room(self, s: Sequence, known: int) -> int:
        """Drafts that can stand behind `known` tokens: none may fill a page, or be the last one that the sequence can have."""
        room = min(self.max_draft, s.limit - known - 1, PAGE - 1 - known % PAGE)
        if known // PAGE != s.num_computed // PAGE:
            return 0
        if self.boundary is not None and known <= self.boundary:
            room = min(room, self.boundary - known - 1)
        return max(room, 0)
