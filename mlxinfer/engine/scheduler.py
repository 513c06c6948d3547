"""Which sequences get how many tokens in the next step. Knows counts and nothing of arrays.

Every answer that needs a token gets it. What `PrefillBudget` allows besides goes to prompts: by priority, then by service to the client,
then by arrival. So clients take turns chunk by chunk, a short prompt never waits for the whole of another client's long one, and prompts
of one client are read one after another. Where pages run out, chunks shrink or wait, then the youngest sequence gives its pages back; the
oldest of the highest priority always goes on, so all of them end.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..cache.pages import PAGE
from ..cache.pool import PageDemand
from .prefill_budget import PrefillBudget
from .request_queue import RequestQueue

if TYPE_CHECKING:
    from .sequence import Sequence

Start = Callable[["Sequence"], "bool | None"]
"""Gives a sequence its slot; False if there is no room for it beside those that run, None if it waits for something else."""


class PageBudget(Protocol):
    def room(self, growth: Many[PageDemand]) -> bool:
        """Whether there are pages for all of this in one step."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `count` tokens of a sequence, of which the last `drafts` are only proposed."""

    sequence: Sequence
    count: int
    drafts: int = 0

    @property
    def samples(self) -> bool:
        """Whether this reaches the end of what is known, so that the next token can be chosen."""
        sequence = self.sequence
        return sequence.num_computed_tokens + self.count - self.drafts == sequence.num_tokens and not sequence.wants_logits

    @property
    def decodes(self) -> bool:
        """Whether its rows bring an answer on, rather than read a prompt."""
        return self.count == 1 + self.drafts


@dataclass(frozen=True, slots=True)
class Schedule:
    """`work` is the next step, with `decode_rows` rows of answers (one each, and drafts) and `prefill_rows` of prompts. Or it is empty, and
    the sequences in `preempt` have to give their pages back before there can be one."""

    work: list[Work] = field(default_factory=list)
    preempt: list[Sequence] = field(default_factory=list)
    decode_rows: int = 0
    prefill_rows: int = 0


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


class Scheduler:
    """`deterministic`: a prompt is cut at every page's end and before its last token, whatever else runs, what is recomputed of an answer
    goes token by token, and there are no drafts: every row is always computed in a chunk of the same shape."""

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_sequences: int,
        room: PageBudget,
        pace: PrefillBudget,
        waiting: RequestQueue,
        deterministic: bool = False,
    ) -> None:
        least = max_sequences + PAGE - 1 if deterministic else max_sequences
        if not 1 <= max_sequences <= least <= max_num_batched_tokens:
            raise ValueError(f"{max_sequences} sequences need max_step_tokens of at least {least}, not {max_num_batched_tokens}")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_sequences = max_sequences
        self.room = room
        self.pace = pace
        self.waiting = waiting
        self.deterministic = deterministic
        self.running: list[Sequence] = []
        self._arrivals = 0
        self._urgent: int | None = None
        """Priority of the first in line, if it found no seat or no room."""

    @property
    def idle(self) -> bool:
        return not self.running and not len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait. Raises `QueueFullError`."""
        self._arrivals = sequence.arrival = max(sequence.arrival, self._arrivals + 1)
        self.waiting.service.join(sequence.client_id)
        try:
            self.waiting.push(sequence)
        except Exception:
            self.waiting.service.leave(sequence.client_id)
            raise

    def run(self, sequence: Sequence) -> None:
        """Let a sequence that was never added, a fork of one that runs, run at once; it has its slot already."""
        self.waiting.service.join(sequence.client_id)
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait that ran, or a fork that finds no room: its place is before all newcomers of its priority."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.service.join(sequence.client_id)
        self.waiting.push_back(sequence)
        self._urgent = None

    def remove(self, sequence: Sequence) -> None:
        """It has ended. Harmless if it is not here."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif not self.waiting.remove(sequence):
            return
        self.waiting.service.leave(sequence.client_id)

    def expired(self, now: float) -> list[Sequence]:
        """Those whose deadline has passed; they stay until they are removed."""
        late = [s for s in self.running if s.deadline is not None and s.deadline <= now]
        return late + self.waiting.expired(now)

    def admit(self, start: Start) -> list[Sequence]:
        """Let those run that are first in line, as long as there are seats, and `start` finds room."""
        admitted: list[Sequence] = []
        self._urgent = None
        while (first := self.waiting.peek()) is not None:
            started = start(first) if len(self.running) < self.max_sequences else False
            if not started:
                self._urgent = first.priority if started is False else None
                break
            self.waiting.remove(first)
            self.running.append(first)
            admitted.append(first)
        return admitted

    def schedule(self) -> Schedule:
        """The next step, given that those before it were submitted. After a preemption, call it again."""
        ready = [s for s in self.running if s.remaining]
        if not ready:
            return Schedule()
        if self._urgent is not None:
            youngest = max(self.running, key=_rank)
            if youngest.priority > self._urgent:
                return Schedule(preempt=[youngest])
        decode, prefill = self._split(ready)
        growth = [PageDemand(s.slot, s.num_computed_tokens, 1) for s in decode if s.num_computed_tokens % PAGE == PAGE - 1]
        if growth and not self.room.room(growth):
            return self._make_room(ready)
        work = self._decode_work(decode, bool(prefill))
        decode_rows = sum([w.count for w in work])
        prefill_rows = 0
        if prefill:
            chunks = self._chunks(prefill, decode_rows, growth)
            if chunks is None:
                return self._make_room(ready)
            prefill_rows = sum([w.count for w in chunks])
            work += chunks
        for w in work:
            self.waiting.service.serve(w.sequence.client_id, w.count)
        self.pace.commit(decode_rows, prefill_rows)
        return Schedule(work, [], decode_rows, prefill_rows)

    def _split(self, ready: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        decode: list[Sequence] = []
        prefill: list[Sequence] = []
        for sequence in ready:
            single = sequence.remaining == 1 or (self._one_by_one(sequence) and sequence.num_computed_tokens >= len(sequence.prompt))
            (decode if single else prefill).append(sequence)
        return decode, prefill

    def _one_by_one(self, sequence: Sequence) -> bool:
        return self.deterministic or sequence.no_chunked_recompute

    def _make_room(self, ready: list[Sequence]) -> Schedule:
        """The youngest leaves. If only one is left, those that have ended still hold pages until their last step has landed."""
        return Schedule(preempt=[max(ready, key=_rank)]) if len(ready) > 1 else Schedule()

    def _decode_work(self, decode: list[Sequence], prefill: bool) -> list[Work]:
        spare = self.max_num_batched_tokens - len(decode)
        if prefill:
            spare //= 2
        work = []
        for sequence in decode:
            drafts = len(sequence.drafts)
            if drafts:
                usable = sequence.remaining == 1 and not self._one_by_one(sequence)
                sequence.drafts = sequence.drafts[: max(spare if usable else 0, 0)]
                drafts = len(sequence.drafts)
            spare -= drafts
            work.append(Work(sequence, 1 + drafts, drafts))
        return work

    def _chunks(self, prefill: list[Sequence], decode_rows: int, growth: list[PageDemand]) -> list[Work] | None:
        """Chunks of prompts; None if pages are so short that the first of all sequences would not go on."""
        service = self.waiting.service
        line = sorted(prefill, key=lambda s: (s.priority, service.of(s.client_id), s.arrival)) if len(prefill) > 1 else prefill
        wanted = sum([s.remaining for s in line])
        most = self.max_num_batched_tokens - decode_rows
        rows = self.pace.allowance(decode_rows, wanted, most, line[0].remaining)
        if self.deterministic and rows:
            rows = min(max(rows, PAGE), most)
        head = min(self.running, key=_rank)
        work: list[Work] = []
        for sequence in line:
            if rows <= 0:
                break
            whole = self._cut(sequence, rows)
            count = self._fitting(sequence, whole, growth)
            if count:
                work.append(Work(sequence, count))
                growth.append(PageDemand(sequence.slot, sequence.num_computed_tokens, count))
                rows -= count
            elif whole and sequence is head:
                return None
        return work

    def _cut(self, sequence: Sequence, rows: int) -> int:
        """Rows of a chunk of at most `rows`: it ends where something is kept or forked, and at a page's end where that is near."""
        past = sequence.num_computed_tokens
        known = sequence.num_tokens
        end = known
        if past < sequence.fork_point:
            end = min(end, sequence.fork_point)
        for mark in sequence.snapshot_points:
            if mark > past:
                end = min(end, mark)
                break
        prompt = len(sequence.prompt)
        if self._one_by_one(sequence) and past < prompt:
            end = min(end, prompt)
        if self.deterministic:
            if past < prompt - 1:
                end = min(end, prompt - 1)
            end = min(end, (past // PAGE + 1) * PAGE)
            return end - past if end - past <= rows else 0
        if past + rows >= end:
            return end - past
        aligned = (past + rows) // PAGE * PAGE
        return aligned - past if aligned > past else rows

    def _fitting(self, sequence: Sequence, count: int, growth: list[PageDemand]) -> int:
        """`count`, or as much of it as there are pages for."""
        past = sequence.num_computed_tokens
        full = (past + count) // PAGE - past // PAGE
        if not full or self.room.room([*growth, PageDemand(sequence.slot, past, count)]):
            return count
        if self.deterministic:
            return 0
        low, high = 0, full
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.room.room([*growth, PageDemand(sequence.slot, past, (past // PAGE + middle) * PAGE - past)])
            low, high = (middle, high) if fits else (low, middle)
        return (past // PAGE + low) * PAGE - past if low else PAGE - 1 - past % PAGE
