"""Chooses the drafts of the next step, and learns from collected steps."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import field
from time import perf_counter
from typing import TYPE_CHECKING, cast

from ...cache.pages import PAGE
from ...util.dataclass import dataclass
from ..core.step_times import StepTimes
from .acceptance import Acceptance, Candidate, best_lengths
from .ngram import MatchStats, NgramIndex

if TYPE_CHECKING:
    from ..core.rope_regime import RopeRegime
    from ..core.schedule import ScheduledSequence
    from ..core.sequence import Proposed, Sequence
    from ..runner.model_runner import PendingStep
    from .drafter import TokenDrafter

_WORTH = 1.05
"""Least speed-up for which a step waits for the one before."""
_AT_ONCE = 512
"""Tokens of a prompt that are indexed per step."""
_HICCUP = 2.0
"""A step counts as at most this many times its expected duration: the machine may have been busy otherwise."""
_PATIENCE = 32
"""Steps without the draft model after which it is tried again."""
_REST = 8
"""Steps for which a draft model without expected gain is not considered, to keep its overhead low."""


@dataclass(slots=True)
class GainAccount:
    """Time saved and lost by speculation. It may lose a small part of all time, and about a step at the start. If it does not pay, it is
    tried ever more rarely."""

    share: float = 0.01
    """Part of all time that may be lost."""
    elapsed: float = 0.0
    """Seconds of all steps, as if without speculation."""
    saved: float = 0.0
    """Saved seconds; negative for a loss."""
    _longest: float = 0.0

    @property
    def open(self) -> bool:
        """True if drafts may be tried."""
        return self.saved >= -self.share * self.elapsed - 0.5 * self._longest

    def plain(self, seconds: float) -> None:
        """Add a step without drafts."""
        self.elapsed += seconds
        self._longest += 0.05 * (seconds - self._longest)

    def round(self, seconds: float, plain_seconds: float) -> None:
        """Add a step of `seconds`, whose tokens would have taken `plain_seconds` without drafts."""
        self.elapsed += plain_seconds
        # Old gains must not pay for losses without end.
        self.saved = min(self.saved + plain_seconds - seconds, 0.1 * self.elapsed, 8 * plain_seconds)


@dataclass(slots=True)
class _SequenceStats:
    """Statistics of one sequence."""

    index: NgramIndex | None
    """None if n-grams are disabled."""
    acceptance: Acceptance
    """Of the draft model."""
    matches: MatchStats = field(default_factory=MatchStats)
    """Of the index."""


@dataclass(frozen=True, slots=True)
class _Plan:
    sequence: Sequence
    candidate: Candidate
    past: _SequenceStats | None
    expected: list[int]
    """Tokens predicted by the grammar; drafted before any others."""


class Proposer:
    """Proposes drafts from earlier text of a sequence, a draft model or a head.

    The engine asks `wants_tokens` while a step is pending, and collects that step if it returns True. Then `propose` sets the drafts of
    sequences. The engine passes every collected step to `learn`, and every sequence that loses its slot to `forget`. A step with drafts
    must be collected before the next one is scheduled.
    """

    def __init__(
        self, max_draft: int, times: StepTimes, rope: RopeRegime, *, draft: TokenDrafter | None = None, ngrams: bool = True
    ) -> None:
        """`max_draft`: most drafts of a sequence in a step; 0 disables drafting."""
        self.max_draft = max_draft if ngrams or draft else 0
        self.times = times
        self.draft = draft
        self.ngrams = ngrams
        self.account = GainAccount()
        self._rope = rope
        self._acceptance = Acceptance()
        self._pasts: dict[Sequence, _SequenceStats] = {}
        self._waits = False
        self._waited = 0.0
        self._quiet, self._patience = 0, _PATIENCE
        self._rest = 0
        """Remaining steps without considering the draft model; none if negative."""

    def wants_tokens(self, running: Iterable[Sequence]) -> bool:
        """True if the pending step should be collected before the next one is scheduled, because drafts are likely to follow its tokens.
        Only tokens on the host are examined, so that sequences without repetitions run as fast as without drafts."""
        self._rest -= 1
        if not self.max_draft or (self._rest >= 0 and not self.ngrams):
            return False
        plans, rows = self._plans(running, ahead=True)
        self._waits = bool(plans) and self.account.open and (self._due(plans) or self._promises(plans, rows))
        if plans and not self._waits and self._rest < 0 and all(plan.sequence.constraint is None for plan in plans):
            self._rest = _REST
        return self._waits

    def _promises(self, plans: list[_Plan], rows: int) -> bool:
        return best_lengths([p.candidate for p in plans], rows, self.times)[1] > _WORTH

    def _due(self, plans: list[_Plan]) -> bool:
        """True if the draft model was not used for long enough to be tried again."""
        return self._quiet >= self._patience and any(plan.candidate.turn for plan in plans)

    def propose(self, running: Many[Sequence]) -> None:
        """Set the drafts of sequences whose last token is on the host, if drafts pay."""
        if not self.max_draft:
            return
        if self._waits:
            self._waits, self._waited = False, perf_counter()
        ready = [s for s in running if s.awaited_token is None]
        if self.draft and self.account.open:
            self.draft.catch_up(running)
        if not ready:
            return
        for s in ready:
            s.propose([])
        plans, rows = self._plans(running, ahead=False)
        if plans and self.account.open:
            lengths, _ = best_lengths([p.candidate for p in plans], rows, self.times)
            self._draft(plans, self._with_trials(plans, lengths))

    def learn(self, step: PendingStep, sampled: Many[ScheduledSequence], seconds: float) -> int:
        """Learn from a collected step that took `seconds`. Returns how often the draft model ran for it."""
        if not self.max_draft:
            return 0
        schedule = step.schedule
        drafted = schedule.drafts
        turns = max([self._learn_accepted(w) for w in sampled if w.num_drafts], default=0) if drafted else 0
        waited = 0 < self._waited <= step.submitted
        if waited:
            self._waited = 0.0
        if not sampled or schedule.prefill_rows or schedule.decode_rows != len(sampled) + drafted:
            return turns
        self._quiet += 1
        if drafted or waited:
            tokens = sum([len(w.new_tokens) for w in sampled])
            likely = self.times.round(schedule.decode_rows) + turns * self.times.turn
            seconds = min(seconds, _HICCUP * likely) if likely else seconds
            self.account.round(seconds, (self.times.step(len(sampled)) or seconds) * tokens / len(sampled))
        else:
            self.account.plain(seconds)
        return turns

    def forget(self, sequence: Sequence) -> None:
        """Drop the statistics of a sequence without a slot."""
        self._pasts.pop(sequence, None)
        if self.draft:
            self.draft.forget(sequence)

    def _draft(self, plans: list[_Plan], lengths: list[int]) -> None:
        modelled = []
        for plan, count in zip(plans, lengths, strict=True):
            s = plan.sequence
            if count and plan.candidate.turn:
                modelled.append((s, count))
            elif count and plan.expected:
                s.propose(plan.expected[:count])
            elif count and plan.past and plan.past.index:
                found = plan.past.index.continuation(count)
                s.propose(_allowed(s, found if s.images is None else _before_images(s, found)))
        if modelled and self.draft:
            self.draft.propose(modelled)
            for s, _ in modelled:
                if s.constraint is not None:
                    s.propose(_allowed(s, s.drafts))

    def _with_trials(self, plans: list[_Plan], lengths: list[int]) -> list[int]:
        """`lengths`, with one draft each if it is time to try the draft model again; that happens ever more rarely."""
        can = [i for i, plan in enumerate(plans) if plan.candidate.turn]
        if any(lengths[i] for i in can):
            self._quiet, self._patience = 0, _PATIENCE
        elif self._due(plans):
            self._quiet, self._patience = 0, min(2 * self._patience, 64 * _PATIENCE)
            for i in can:
                lengths[i] = 1
        return lengths

    def _learn_accepted(self, w: ScheduledSequence) -> int:
        """Count accepted drafts of the draft model. Returns how often it ran for them."""
        if isinstance(w.proposed, list):
            return 0
        s, accepted = w.sequence, len(w.new_tokens) - 1
        if self.draft:
            self.draft.verified(s, accepted)
        self._acceptance.learn(w.num_drafts, accepted)
        self._rest = 0
        if s in self._pasts:
            self._pasts[s].acceptance.learn(w.num_drafts, accepted)
        return w.num_drafts

    def _plans(self, running: Iterable[Sequence], *, ahead: bool) -> tuple[list[_Plan], int]:
        """Possible drafts after the last token of each sequence, which is on the host or (`ahead`) pending; and the number of sequences
        that get a token."""
        plans, rows = [], 0
        for s in running:
            remaining = s.remaining
            if not remaining:
                continue
            rows += 1
            if remaining != 1 or (s.awaited_token is not None) != ahead:
                continue
            past = self._updated_stats(s)
            expected, chances = _expected(s, ahead)
            candidate = self._candidate(s, past, ahead) if past is not None and (self.draft or (past.index and past.index.run)) else None
            if expected and sum(chances) >= (sum(candidate.chances) if candidate else 0.0):
                room = self._room(s)
                candidate = Candidate(chances[:room]) if room else None
            else:
                expected = []
            if candidate is not None:
                plans.append(_Plan(s, candidate, past, expected))
        return plans, rows

    def _candidate(self, s: Sequence, past: _SequenceStats, ahead: bool) -> Candidate | None:
        room = self._room(s)
        if not room:
            return None
        found: list[float] = []
        if past.index is not None and past.index.run:
            # The first predicted token may be the pending one: not a draft, but later drafts need it to be right.
            found = past.matches.chances(past.index.run, room + ahead)[int(ahead) :]
        if self.draft and not (ahead and self._rest >= 0):
            can = min(room, self.draft.room(s) - ahead)
            modelled = past.acceptance.chances(can) or [0.0] * min(can, 1)
            if modelled and sum(modelled) >= sum(found):
                return Candidate(modelled, self.times.turn or self.draft.cost * (self.times.step(1) or 1.0))
        return Candidate(found) if found else None

    def _updated_stats(self, s: Sequence) -> _SequenceStats | None:
        """Statistics of a running answer, updated with all tokens on the host; None while the index lags behind."""
        past = self._pasts.get(s)
        if past is None:
            if len(s.tokens) <= len(s.prompt) or s.is_only_read or s.samples_to_fork or self._rope.token_by_token(s):
                return None
            index = NgramIndex(s.tokens, s.max_length) if self.ngrams else None
            past = self._pasts[s] = _SequenceStats(index, self._acceptance.copy())
        index = past.index
        if index is None:
            return past
        missing = len(s.tokens) - index.known
        if missing > self.max_draft + 2:
            index.extend(_AT_ONCE)
            return None
        for _ in range(missing):
            run = index.run
            right = index.add()
            if right is not None:
                past.matches.learn(run, right)
        return past

    def _room(self, s: Sequence) -> int:
        """Possible drafts after the known tokens: none may fill a page or be the last possible token of the sequence."""
        known = s.num_tokens
        if known // PAGE != s.num_computed_tokens // PAGE:
            return 0
        limit = s.max_length if self._rope.boundary is None else self._rope.draft_limit(s)
        return max(min(self.max_draft, limit - known - 1, PAGE - 1 - known % PAGE), 0)


def _expected(s: Sequence, ahead: bool) -> tuple[list[int], list[float]]:
    """Tokens that a structure predicts after the last known one, and their chances. If that one is pending (`ahead`), it is assumed to be
    the first predicted one."""
    if s.constraint is None:
        return [], []
    tokens, chances = s.constraint.expected()
    end = next((i for i, token in enumerate(tokens) if token in s.stop_ids), len(tokens))
    return tokens[int(ahead) : end], chances[int(ahead) : end]


def _before_images(s: Sequence, drafts: list[int]) -> list[int]:
    """The leading drafts that are not placeholders of image rows, whose ids the embedding may lack."""
    assert s.images is not None
    placeholder = s.prompt[s.images.runs[0].start]
    return drafts[: drafts.index(placeholder)] if placeholder in drafts else drafts


def _allowed(s: Sequence, drafts: Proposed) -> Proposed:
    """The leading drafts that the sequence's structure allows."""
    if s.constraint is None:
        return drafts
    known = drafts if isinstance(drafts, list) else cast("list[int]", drafts.tolist())
    return known[: s.constraint.allowed(known)]
