"""Which sequences get how many drafts in the next step, and what was learnt from the last one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from ...cache.base import PAGE
from .acceptance import Acceptance, Candidate, GainAccount, MatchStats, RoundTimes, best_lengths
from .ngram import NgramIndex

if TYPE_CHECKING:
    from ..model_runner import PendingStep, SequenceOutput
    from ..sequence import Sequence
    from .draft_model import DraftModel

_WORTH = 1.05
"""Gain from which a step is made to wait for the one before it."""
_AT_ONCE = 512
"""Tokens of a prompt that are indexed between two steps."""
_PATIENCE = 32
"""Steps without the draft model after which it is tried again."""


@dataclass(slots=True)
class _Past:
    index: NgramIndex
    acceptance: Acceptance
    """Of what the draft model proposes."""
    foresight: MatchStats = field(default_factory=MatchStats)


@dataclass(frozen=True, slots=True)
class _Plan:
    sequence: Sequence
    past: _Past
    prospect: Candidate


class Proposer:
    """Proposes drafts: what a sequence has said before, or what a draft model says. The engine asks `promising` before it submits a step
    ahead of time, and lands what is in flight if so; then `propose` fills `Sequence.drafts`. It tells `landed` of every step and `forget`
    of every sequence that gives its slot back. A step with drafts is to be landed before the next one is proposed.
    """

    def __init__(self, max_draft: int, *, boundary: int | None = None, draft: DraftModel | None = None, ngrams: bool = True) -> None:
        """`max_draft` is for each sequence and step; `boundary` is `Model.recompute_at`."""
        self.max_draft = max_draft
        self.boundary = boundary
        self.draft = draft
        self.ngrams = ngrams
        self.times = RoundTimes()
        self.account = GainAccount()
        self._acceptance = Acceptance()
        self._turn = 0.0
        self._pasts: dict[Sequence, _Past] = {}
        self._landed_at = 0.0
        self._waits = False
        self._waited = 0.0
        self._quiet, self._patience = 0, _PATIENCE

    @property
    def _idle(self) -> bool:
        return not self.max_draft or not (self.ngrams or self.draft)

    def promising(self, running: Iterable[Sequence]) -> bool:
        """Whether the step in flight should be read before the next one: drafts are likely to follow what it gives. Only tokens that have
        been read already are looked at, so that sequences which never repeat themselves run as fast as without."""
        if self._idle:
            return False
        plans, rows = self._plans(running, ahead=True)
        self._waits = bool(plans) and self.account.open and best_lengths([p.prospect for p in plans], rows, self.times)[1] > _WORTH
        return self._waits

    def propose(self, running: Iterable[Sequence]) -> None:
        """Fill `drafts` of the sequences whose last token has been read, if that pays."""
        if self._idle:
            return
        if self._waits:
            self._waits, self._waited = False, perf_counter()
        running = list(running)
        for s in running:
            s.drafts = []
        plans, rows = self._plans(running, ahead=False)
        if self.draft and self.account.open:
            self.draft.catch_up([s for s in running if s.slot is not None and s.remaining and not s.wants_logits])
        if not plans or not self.account.open:
            return
        lengths, _ = best_lengths([p.prospect for p in plans], rows, self.times)
        self._fill(plans, self._probed(plans, lengths))

    def _fill(self, plans: list[_Plan], lengths: list[int]) -> None:
        modelled = []
        for plan, count in zip(plans, lengths, strict=True):
            if count and plan.prospect.turn:
                modelled.append((plan.sequence, count))
            elif count:
                plan.sequence.drafts = plan.past.index.continuation(count)
        if modelled and self.draft:
            self.draft.propose(modelled)

    def _probed(self, plans: list[_Plan], lengths: list[int]) -> list[int]:
        """Try the draft model again where it has not paid for a while; ever more rarely."""
        can = [i for i, plan in enumerate(plans) if plan.prospect.turn]
        if any(lengths[i] for i in can):
            self._quiet, self._patience = 0, _PATIENCE
        elif can and self._quiet >= self._patience:
            self._quiet, self._patience = 0, min(2 * self._patience, 64 * _PATIENCE)
            lengths[can[0]] = 1
        return lengths

    def landed(self, flight: PendingStep, drawn: Iterable[SequenceOutput], now: float) -> None:
        """Learn from a step that has been read."""
        if self._idle:
            return
        drained = flight.launched >= self._landed_at
        # Waiting for somebody to read the answer is not part of a step.
        seconds = now - max(self._landed_at, flight.launched - 0.002)
        self._landed_at = now
        got = list(drawn)
        turns = max((self._learn(d) for d in got), default=0)
        drafted = sum(d.drafted for d in got)
        waited = 0 < self._waited <= flight.launched
        if waited:
            self._waited = 0.0
        if flight.rows != len(got) + drafted or not got:
            return
        if turns:
            self._turn += 0.2 * (max(seconds - self.times.round(flight.rows), 0.0) / turns - self._turn)
        else:
            self.times.observe(flight.rows, seconds, drained=drained)
        self._quiet += 1
        if drafted or waited:
            tokens = sum(len(d.tokens) for d in got)
            self.account.round(seconds, (self.times.step(len(got)) or seconds) * tokens / len(got))
        else:
            self.account.plain(seconds)

    def forget(self, sequence: Sequence) -> None:
        self._pasts.pop(sequence, None)
        if self.draft:
            self.draft.forget(sequence)

    def _learn(self, drawn: SequenceOutput) -> int:
        """Count what holds. Returns the turns of the draft model that it took."""
        s, accepted = drawn.draw.sequence, min(len(drawn.tokens) - 1, drawn.drafted)
        s.drafted += drawn.drafted
        s.accepted += accepted
        if not drawn.drafted or isinstance(drawn.draw.drafts, list):
            return 0
        if self.draft:
            self.draft.landed(s, accepted)
        self._acceptance.learn(drawn.drafted, accepted)
        if s in self._pasts:
            self._pasts[s].acceptance.learn(drawn.drafted, accepted)
        return drawn.drafted

    def _plans(self, running: Iterable[Sequence], *, ahead: bool) -> tuple[list[_Plan], int]:
        """What could be drafted behind the last token of each sequence, which has been read or (`ahead`) is still in flight; and how many
        sequences get a token."""
        plans, rows = [], 0
        for s in running:
            if not s.remaining:
                continue
            rows += 1
            past = self._follow(s)
            room = self._room(s)
            if past is None or not room or s.remaining != 1 or (s.pending_token is not None) != ahead:
                continue
            prospect = self._prospect(s, past, room, ahead)
            if prospect is not None:
                plans.append(_Plan(s, past, prospect))
        return plans, rows

    def _prospect(self, s: Sequence, past: _Past, room: int, ahead: bool) -> Candidate | None:
        found: list[float] = []
        if self.ngrams and past.index.run:
            # The first of what is foretold may be in flight: it is no draft, but drafts are of use only if it is as foretold.
            found = past.foresight.chances(past.index.run, room + ahead)[int(ahead) :]
        if self.draft:
            can = min(room, self.draft.room(s) - ahead)
            modelled = past.acceptance.chances(can) or [0.0] * min(can, 1)
            if modelled and sum(modelled) >= sum(found):
                turn = self._turn or self.draft.cost * (self.times.step(1) or 1.0)
                return Candidate(modelled, turn)
        return Candidate(found) if found else None

    def _follow(self, s: Sequence) -> _Past | None:
        """The index of an answer that is being written, with all tokens read so far; None while it is not up to date."""
        if len(s.tokens) <= len(s.prompt) or s.wants_logits or s.samples_to_fork or s.no_chunked_recompute:
            return None
        past = self._pasts.get(s)
        if past is None:
            past = self._pasts[s] = _Past(NgramIndex(s.tokens, s.limit), self._acceptance.copy())
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

    def _room(self, s: Sequence) -> int:
        """Drafts that can stand behind what is known: none may fill a page, or be the last token that the sequence can have."""
        known = s.num_tokens
        if known // PAGE != s.num_computed_tokens // PAGE:
            return 0
        room = min(self.max_draft, s.limit - known - 1, PAGE - 1 - known % PAGE)
        if self.boundary is not None and known <= self.boundary:
            room = min(room, self.boundary - known - 1)
        return max(room, 0)
