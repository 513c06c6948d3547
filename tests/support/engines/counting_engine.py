"""An engine that computes nothing: scheduler, pool of pages and a clock, for properties that are about counts only."""

from __future__ import annotations

from typing import Any

from mlxinfer.cache.pages import PAGE
from mlxinfer.cache.pool import PageDemand, PagePool
from mlxinfer.engine.core.chunk_policy import ChunkPolicy, DeterministicChunks
from mlxinfer.engine.core.prefill_budget import PrefillBudget
from mlxinfer.engine.core.request_queue import RequestQueue
from mlxinfer.engine.core.schedule import Schedule, ScheduledSequence
from mlxinfer.engine.core.scheduler import Allocation, Scheduler
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.core.step_times import StepTimes
from mlxinfer.types import SamplingParams


def sequence(prompt: int, answer: int, *, start: int = 0, **fields: object) -> Sequence:
    tokens = list(range(start, start + prompt))
    return Sequence(prompt=tokens, params=SamplingParams(), seed=0, max_length=prompt + answer, **fields)


_ON_DEVICE: Any = object()
"""In place of the array that a token waits in."""


class CountingEngine:
    """One step is submitted before the one before it is collected; the pages that this one fills have got their places by then."""

    def __init__(
        self,
        *,
        pages: int,
        max_num_batched_tokens: int = 96,
        max_num_seqs: int = 4,
        deterministic: bool = False,
        reuse: bool = True,
        longest_span: int = 0,
    ):
        chunk = max(max_num_batched_tokens, longest_span)
        self.pool = PagePool([None, 100], kv_cache_tokens=pages * PAGE, chunk=chunk, prefix_cache_tokens=pages * PAGE * reuse)
        self.longest_span = longest_span
        self.times = StepTimes()
        self.scheduler = Scheduler(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            pages=self.pool,
            budget=PrefillBudget(self.times, share=0.75, max_step_s=0.1),
            waiting=RequestQueue(1000),
            chunks=DeterministicChunks() if deterministic else ChunkPolicy(),
        )
        self.pending: Schedule | None = None
        self.now = 0.0
        self.pasts: dict[int, int] = {}
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.finished: list[Sequence] = []

    def allocate(self, s: Sequence) -> Allocation:
        match = self.pool.find(s.tokens, spans=s.images.spans if s.images else ())
        growth = [PageDemand(r.slot, r.num_computed_tokens, r.remaining + PAGE) for r in self.scheduler.running]
        new = PageDemand(None, match.reused, len(s.tokens) - match.reused + PAGE, match)
        if growth and not self.pool.room([*growth, new]):
            return Allocation.NO_ROOM
        s.attach(self.pool.open(match), match.reused)
        return Allocation.DONE

    def step(self) -> Schedule:
        for w in self.pending.work if self.pending else ():
            self.seal(w)
        for s in self.scheduler.expired(self.now):
            self.end(s, "timeout")
        self.scheduler.admit(self.allocate)
        while (schedule := self.scheduler.schedule()).preempt:
            assert not schedule.work
            self.collect()
            for s in schedule.preempt:
                if s in self.scheduler.running:
                    self.preempt(s)
        self.check(schedule)
        before, self.pending = self.pending, None
        for w in schedule.work:
            self.submit(w)
        if before:
            self.pending = before
            self.collect()
        self.pending = schedule if schedule.work else None
        return schedule

    def check(self, schedule: Schedule) -> None:
        rows = [w.count for w in schedule.work]
        most = max(self.scheduler.max_num_batched_tokens, schedule.decode_rows + self.longest_span)
        assert sum(rows) == schedule.decode_rows + schedule.prefill_rows <= most
        assert all(count > 0 for count in rows)
        assert len({w.sequence for w in schedule.work}) == len(rows) <= len(self.scheduler.running) <= self.scheduler.max_num_seqs

    def submit(self, work: ScheduledSequence) -> None:
        s = work.sequence
        self.pasts[id(work)] = s.num_computed_tokens
        self.chunks.append((s, s.num_computed_tokens, work.count))
        s.advance(work.count - work.num_drafts)
        if work.samples and not work.num_drafts:
            s.follow(_ON_DEVICE, 0)

    def collect(self) -> None:
        schedule, self.pending = self.pending, None
        if schedule is None:
            return
        seconds = 0.002 + 0.0005 * (schedule.decode_rows + schedule.prefill_rows)
        self.now += seconds
        self.times.observe(schedule.decode_rows, schedule.prefill_rows, seconds)
        self.scheduler.budget.observe(schedule.decode_rows, schedule.prefill_rows, seconds)
        for w in schedule.work:
            s = w.sequence
            if s.slot is None:
                continue
            if s.finish_reason is None and len(s.tokens) < s.num_tokens:
                s.append([1000 * s.arrival + len(s.tokens)], self.now)
                if s.finish_reason:
                    self.scheduler.remove(s)
            self.seal(w)
            if s.finish_reason:
                self.end(s, s.finish_reason)

    def seal(self, w: ScheduledSequence) -> None:
        s, past = w.sequence, self.pasts.pop(id(w), None)
        if s.slot is None or past is None:
            return
        count = w.count - w.num_drafts
        if past // PAGE < (past + count) // PAGE:
            assert len(s.tokens) >= (past + count) // PAGE * PAGE, "all tokens of a full page are known"
            self.pool.seal(s.slot, past, count, s.tokens)
            self.pool.leave_behind(s.slot, past + count)

    def preempt(self, s: Sequence) -> None:
        assert s.slot is not None
        self.pool.release(s.slot)
        s.preempt()
        self.scheduler.requeue(s)

    def end(self, s: Sequence, reason: str = "cancelled") -> None:
        s.finish(reason)
        self.scheduler.remove(s)
        pending = self.pending is not None and any(w.sequence is s for w in self.pending.work)
        if s.slot is not None and not pending:
            self.pool.release(s.slot)
            s.detach()
        if s not in self.finished:
            self.finished.append(s)

    def run(self, steps: int = 20000) -> None:
        for _ in range(steps):
            self.step()
            if self.scheduler.idle and self.pending is None:
                return
        raise AssertionError("it does not end")
