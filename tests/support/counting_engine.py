"""An engine that computes nothing: scheduler, pool of pages and a clock, for properties that are about counts only."""

from __future__ import annotations

from mlxinfer.cache.pages import PAGE
from mlxinfer.cache.pool import PageDemand, PagePool
from mlxinfer.engine.prefill_budget import PrefillBudget, StepTimeModel
from mlxinfer.engine.request_queue import RequestQueue
from mlxinfer.engine.scheduler import Schedule, Scheduler, Work
from mlxinfer.engine.sequence import Sequence
from mlxinfer.types import SamplingParams


def sequence(prompt: int, answer: int, *, start: int = 0, **fields: object) -> Sequence:
    tokens = list(range(start, start + prompt))
    return Sequence(prompt=tokens, params=SamplingParams(), seed=0, limit=prompt + answer, **fields)


class CountingEngine:
    """One step is submitted before the one before it has landed, unless that filled pages. Every row takes `row_s` seconds."""

    def __init__(
        self, *, pages: int, max_num_batched_tokens: int = 96, max_sequences: int = 4, deterministic: bool = False, reuse: bool = True
    ):
        self.pool = PagePool(
            [None, 100], kv_cache_tokens=pages * PAGE, chunk=max_num_batched_tokens, prefix_cache_tokens=pages * PAGE * reuse
        )
        self.scheduler = Scheduler(
            max_num_batched_tokens=max_num_batched_tokens,
            max_sequences=max_sequences,
            room=self.pool,
            pace=PrefillBudget(StepTimeModel(), share=0.75, max_step_s=0.1),
            waiting=RequestQueue(1000),
            deterministic=deterministic,
        )
        self.flight: Schedule | None = None
        self.now = 0.0
        self.pasts: dict[int, int] = {}
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.finished: list[Sequence] = []

    def start(self, s: Sequence) -> bool:
        match = self.pool.find(s.tokens)
        growth = [PageDemand(r.slot, r.num_computed_tokens, r.remaining + PAGE) for r in self.scheduler.running]
        new = PageDemand(None, match.reused, len(s.tokens) - match.reused + PAGE, match)
        if growth and not self.pool.room([*growth, new]):
            return False
        s.slot, s.num_computed_tokens = self.pool.open(match), match.reused
        return True

    def step(self) -> Schedule:
        if self.flight and any(w.sequence.num_computed_tokens % PAGE < w.count for w in self.flight.work):
            self.land()
        for s in self.scheduler.expired(self.now):
            self.end(s, "timeout")
        self.scheduler.admit(self.start)
        while (schedule := self.scheduler.schedule()).preempt:
            assert not schedule.work
            self.land()
            for s in schedule.preempt:
                if s in self.scheduler.running:
                    self.preempt(s)
        self.check(schedule)
        before, self.flight = self.flight, None
        for w in schedule.work:
            self.launch(w)
        if before:
            self.flight = before
            self.land()
        self.flight = schedule if schedule.work else None
        return schedule

    def check(self, schedule: Schedule) -> None:
        rows = [w.count for w in schedule.work]
        assert sum(rows) == schedule.decode_rows + schedule.prefill_rows <= self.scheduler.max_num_batched_tokens
        assert all(count > 0 for count in rows)
        assert len({w.sequence for w in schedule.work}) == len(rows) <= len(self.scheduler.running) <= self.scheduler.max_sequences

    def launch(self, work: Work) -> None:
        s = work.sequence
        self.pasts[id(work)] = s.num_computed_tokens
        self.chunks.append((s, s.num_computed_tokens, work.count))
        samples = work.samples
        s.num_computed_tokens += work.count - work.drafts
        s.num_tokens += samples
        s.drafts.clear()

    def land(self) -> None:
        schedule, self.flight = self.flight, None
        if schedule is None:
            return
        seconds = 0.002 + 0.0005 * (schedule.decode_rows + schedule.prefill_rows)
        self.now += seconds
        self.scheduler.pace.observe(schedule.decode_rows, schedule.prefill_rows, seconds)
        for w in schedule.work:
            s = w.sequence
            if s.slot is None:
                continue
            if s.finish_reason is None and len(s.tokens) < s.num_tokens:
                s.tokens.append(1000 * s.arrival + len(s.tokens))
                if len(s.tokens) == s.limit:
                    s.finish_reason = "length"
                    self.scheduler.remove(s)
            count, past = w.count - w.drafts, self.pasts.pop(id(w))
            if past // PAGE < (past + count) // PAGE:
                self.pool.seal(s.slot, past, count, s.tokens)
                self.pool.leave_behind(s.slot, past + count)
            if s.finish_reason:
                self.end(s, s.finish_reason)

    def preempt(self, s: Sequence) -> None:
        assert s.slot is not None
        self.pool.release(s.slot)
        s.slot, s.num_computed_tokens = None, 0
        s.num_tokens = len(s.tokens)
        s.preemptions += 1
        self.scheduler.requeue(s)

    def end(self, s: Sequence, reason: str = "cancelled") -> None:
        s.finish_reason = s.finish_reason or reason
        self.scheduler.remove(s)
        flying = self.flight is not None and any(w.sequence is s for w in self.flight.work)
        if s.slot is not None and not flying:
            self.pool.release(s.slot)
            s.slot = None
        if s not in self.finished:
            self.finished.append(s)

    def run(self, steps: int = 20000) -> None:
        for _ in range(steps):
            self.step()
            if self.scheduler.idle and self.flight is None:
                return
        raise AssertionError("it does not end")
