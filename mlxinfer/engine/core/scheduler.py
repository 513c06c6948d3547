"""Chooses the sequences and tokens of the next step. It works on counts, without arrays, and changes no sequence.

Every answer that needs a token gets it. Prompts get what `PrefillBudget` allows in addition: by priority, then the least served client,
then arrival. Clients thus alternate chunk by chunk, a short prompt never waits for the whole of another client's long one, and prompts of
one client are read one after another. If pages run out, chunks shrink or wait, then the youngest sequence is preempted. The oldest of the
highest priority always continues, so all sequences end.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ...cache.pages import PAGE
from ...cache.pool import PageDemand
from .chunk_policy import ChunkPolicy
from .prefill_budget import PrefillBudget
from .request_queue import RequestQueue
from .schedule import Schedule, ScheduledSequence

if TYPE_CHECKING:
    from .sequence import Sequence


class Allocation(Enum):
    """Result of the attempt to give a waiting sequence its slot."""

    DONE = "done"
    NO_ROOM = "no room"
    """Running sequences need the pages."""
    LOADING = "loading"
    """Its cached prefix is being read from disk or from another machine."""


_MOST_LOADING = 4
"""Sequences whose prefixes may be loading at once; later ones wait."""


class PageBudget(Protocol):
    """The cache as the scheduler sees it."""

    def room(self, growth: Many[PageDemand]) -> bool:
        """Return True if one step has pages for all of `growth`."""
        ...


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


class Scheduler:
    """The running and the waiting sequences."""

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        pages: PageBudget,
        budget: PrefillBudget,
        waiting: RequestQueue,
        chunks: ChunkPolicy | None = None,
        max_scored_rows: int = 2**31,
    ) -> None:
        """`max_num_batched_tokens`: rows of a step. `max_num_seqs`: running sequences. `max_scored_rows`: rows of a step whose logits are
        returned. Raises `ValueError` if the rows are too few for the sequences."""
        chunks = chunks or ChunkPolicy()
        least = chunks.least_rows(max_num_seqs)
        if not 1 <= max_num_seqs <= least <= max_num_batched_tokens:
            raise ValueError(f"{max_num_seqs} sequences need max_num_batched_tokens of at least {least}, not {max_num_batched_tokens}")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_scored_rows = max_scored_rows
        self.pages = pages
        self.budget = budget
        self.waiting = waiting
        self.chunks = chunks
        self.running: list[Sequence] = []
        self._arrivals = 0
        self._blocked: int | None = None
        """Priority of the next waiting sequence, if it found no seat or no room."""

    @property
    def idle(self) -> bool:
        """True if no sequence runs or waits."""
        return not self.running and not self.waiting.sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `QueueFullError`."""
        self.waiting.check()
        self._arrivals = max(sequence.arrival, self._arrivals + 1)
        sequence.arrive(self._arrivals)
        self.waiting.service.join(sequence.client_id)
        self.waiting.push(sequence)

    def run(self, sequence: Sequence) -> None:
        """Run a fork of a running sequence at once; it has its slot already."""
        self.waiting.service.join(sequence.client_id)
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence that ran, or a fork without room, before all new ones of its priority."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.service.join(sequence.client_id)
        self.waiting.push_back(sequence)
        self._blocked = None

    def inherit(self, before: Scheduler) -> None:
        """Take over all sequences of a scheduler that is not used any more. Its running ones have no slots now, and are queued first."""
        self.waiting, self._arrivals, self.running = before.waiting, before._arrivals, before.running
        for sequence in list(self.running):
            self.requeue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence. Harmless if it is not here."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif self.waiting.remove(sequence):
            self._blocked = None
        else:
            return
        self.waiting.service.leave(sequence.client_id)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed; they stay until they are removed. `now`: seconds of `perf_counter`."""
        late = [s for s in self.running if s.deadline is not None and s.deadline <= now]
        return late + self.waiting.expired(now) if self.waiting.sequences else late

    def admit(self, allocate: Callable[[Sequence], Allocation]) -> list[Sequence]:
        """Run waiting sequences in order while there are seats and `allocate` finds room, and return them. A request whose prefix is
        still loading keeps its place and blocks no other request."""
        admitted: list[Sequence] = []
        self._blocked = None
        with self.waiting.aside() as set_aside:
            while (first := self.waiting.peek()) is not None:
                allocation = allocate(first) if len(self.running) < self.max_num_seqs else Allocation.NO_ROOM
                if allocation is Allocation.LOADING and set_aside(first) < _MOST_LOADING:
                    continue
                if allocation is not Allocation.DONE:
                    self._blocked = first.priority if allocation is Allocation.NO_ROOM else None
                    break
                self.waiting.remove(first)
                self.running.append(first)
                admitted.append(first)
        return admitted

    def must_measure(self, submitted: Schedule) -> bool:
        """True if the rows of the next step depend on the duration of this one."""
        return self.budget.must_measure(submitted.decode_rows, submitted.prefill_rows, self.max_num_batched_tokens)

    def schedule(self) -> Schedule:
        """The next step, after the previous ones were submitted. Call it again after a preemption."""
        decode: list[Sequence] = []
        prefill: list[Sequence] = []
        stalled: list[Sequence] = []  # wait for the features of an image
        for s in self.running:
            remaining = s.remaining
            if remaining and s.num_computed_tokens >= s.readable:
                stalled.append(s)
            elif remaining:
                (decode if remaining == 1 or self.chunks.token_by_token(s) else prefill).append(s)
        if not decode and not prefill:
            return Schedule()
        if self._blocked is not None:
            youngest = max(self.running, key=_rank)
            if youngest.priority > self._blocked:
                return Schedule(preempt=[youngest])
        growth = [PageDemand(s.slot, s.num_computed_tokens, 1) for s in decode if s.num_computed_tokens % PAGE == PAGE - 1]
        if growth and not self.pages.room(growth):
            return self._make_room(decode + prefill + stalled)
        work, drafts = self._decode_work(decode, self.max_num_batched_tokens - len(decode), sharing=bool(prefill))
        decode_rows, prefill_rows = len(decode) + drafts, 0
        if prefill:
            chunks = self._chunks(prefill, decode_rows, growth)
            if chunks is None:
                return self._make_room(decode + prefill + stalled)
            prefill_rows = sum([w.count for w in chunks])
            work += chunks
        for w in work:
            self.waiting.service.served[w.sequence.client_id] += w.count
        if prefill_rows:
            self.budget.commit(decode_rows, prefill_rows)
        else:
            self.budget.plain[decode_rows] += 1
        return Schedule(work, [], decode_rows, prefill_rows, drafts)

    def _make_room(self, ready: list[Sequence]) -> Schedule:
        """Preempt the youngest. If only one is left, ended sequences hold pages until their last step is collected."""
        return Schedule(preempt=[max(ready, key=_rank)]) if len(ready) > 1 else Schedule()

    def _decode_work(self, decode: list[Sequence], spare: int, *, sharing: bool) -> tuple[list[ScheduledSequence], int]:
        """A row for each answer, and drafts in up to `spare` rows, or half of them if the step reads prompts too (`sharing`). Also returns
        the number of drafts."""
        spare = left = spare // 2 if sharing else spare
        work = []
        for s in decode:
            drafts = max(min(len(s.drafts), left), 0)
            left -= drafts
            work.append(ScheduledSequence(s, 1 + drafts, drafts, s.num_computed_tokens + 1 == s.num_tokens and not s.is_only_read))
        return work, spare - left

    def _chunks(self, prefill: list[Sequence], decode_rows: int, growth: list[PageDemand]) -> list[ScheduledSequence] | None:
        """Chunks of prompts; None if the first of all running sequences gets no pages."""
        service = self.waiting.service
        line = sorted(prefill, key=lambda s: (s.priority, service.of(s.client_id), s.arrival)) if len(prefill) > 1 else prefill
        wanted = sum([s.remaining for s in line])
        most = self.max_num_batched_tokens - decode_rows
        rows = self.chunks.prefill_rows(self.budget.allowance(decode_rows, wanted, most, line[0].remaining), most)
        head, scored = min(self.running, key=_rank), self.max_scored_rows
        work: list[ScheduledSequence] = []
        for s in line:
            if rows <= 0:
                break
            whole = self.chunks.length(s, min(rows, scored) if s.wants_logits else rows)
            if whole > rows and work:
                continue  # a span, which may take more than its share once it is the first
            count = self._fitting(s, whole, growth)
            if count:
                ends = s.num_computed_tokens + count == s.num_tokens
                work.append(ScheduledSequence(s, count, 0, ends and not s.is_only_read))
                growth.append(PageDemand(s.slot, s.num_computed_tokens, count))
                rows -= count
                scored -= count if s.wants_logits else 0
            elif whole and s is head:
                return None
        return work

    def _fitting(self, sequence: Sequence, count: int, growth: list[PageDemand]) -> int:
        """`count`, or as many tokens as there are pages for."""
        past = sequence.num_computed_tokens
        full = (past + count) // PAGE - past // PAGE
        if not full or self.pages.room([*growth, PageDemand(sequence.slot, past, count)]):
            return count
        low, high = 0, full
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.pages.room([*growth, PageDemand(sequence.slot, past, (past // PAGE + middle) * PAGE - past)])
            low, high = (middle, high) if fits else (low, middle)
        return self.chunks.shortened(sequence, low)
