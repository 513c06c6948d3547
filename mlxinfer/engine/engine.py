"""The loop: schedule, run, read. One step is always submitted before the one before it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx

from ..cache.format import KVFormat
from ..cache.paged import PagedCache
from ..config import EngineConfig
from ..models.base import Model
from ..types import FinishReason
from .runner import Drawn, Flight, Runner
from .scheduler import Scheduler
from .sequence import Sequence
from .speculation.draft_model import Drafter
from .speculation.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a sequence got: its id, and if asked for its log-probability and the likeliest ones as (id, logprob)."""

    sequence: Sequence
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits `[rows, vocab]` float32 of the next rows of a sequence that wants them."""

    sequence: Sequence
    rows: mx.array


Event = Token | Logits


class Engine:
    """Runs sequences to their end. Not thread-safe: one thread owns it."""

    def __init__(self, model: Model, config: EngineConfig, *, dtype: mx.Dtype, kv: KVFormat | None = None, drafter: Drafter | None = None) -> None:
        self.drafter = drafter
        self.model = model
        self.config = config
        self.kv = kv or KVFormat()
        self._dtype = dtype
        self._start()

    def _start(self) -> None:
        self.cache = PagedCache(
            self.model.layers,
            dtype=self._dtype,
            capacity_tokens=self.config.capacity_tokens,
            chunk=self.config.max_step_tokens,
            kv=self.kv,
        )
        self.runner = Runner(self.model, self.cache)
        self.scheduler = Scheduler(
            max_step_tokens=self.config.max_step_tokens, max_sequences=self.config.max_sequences, fits=self.cache.fits
        )
        draft = self.drafter.start(self.config, self.model.vocab_size) if self.drafter else None
        most = self.config.max_draft if self.cache.can_fork else 0
        self.speculator = Speculator(most, boundary=self.model.recompute_at, draft=draft)
        self._flights: deque[Flight] = deque()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._flights

    def add(self, sequence: Sequence) -> None:
        """Put a sequence, and its followers, on the waiting list. Raises `MemoryPlanError` if it can never fit."""
        forks = self.cache.can_fork and len(sequence.prompt) > 1
        followers = sequence.followers
        if not forks:
            sequence.followers = []
        for s in (sequence, *([] if forks else followers)):
            self.scheduler.add(s)

    def abort(self, sequence: Sequence, reason: FinishReason = "cancelled") -> None:
        """End a sequence now; what it holds goes back as soon as no step in flight uses it."""
        for s in (sequence, *sequence.followers):
            if s.finish_reason is None:
                s.finish_reason = reason
            self.scheduler.remove(s)
            self._release_if_landed(s)

    def step(self) -> list[Event]:
        """Submit the next step and read the one before it. After any exception, all sequences are cancelled and the engine is fresh."""
        try:
            events = self._land_if(self._must_land)
            self._admit()
            self.speculator.propose(self.scheduler.running)
            work = self.scheduler.schedule()
            if work:
                self._flights.append(self.runner.launch(work))
            return events + self._land_if(lambda: len(self._flights) > (1 if work else 0))
        except BaseException:
            self._cancel_all()
            raise

    def _must_land(self) -> bool:
        """Whether the step in flight has to be finished first: it fills pages, verifies drafts or should be followed by some, or a
        sequence has to be computed anew."""
        if not self._flights:
            return False
        flight, running = self._flights[-1], self.scheduler.running
        return flight.needs_commit or flight.drafted or any(map(self._outgrown, running)) or self.speculator.promising(running)

    def _land_if(self, condition: Callable[[], bool]) -> list[Event]:
        events: list[Event] = []
        while condition():
            events += self._land(self._flights.popleft())
        return events

    def _admit(self) -> None:
        for sequence in filter(self._outgrown, self.scheduler.running):
            self._restart(sequence)
        for leader in self.scheduler.running:
            if leader.followers and leader.num_computed == leader.fork_point:
                self._fork(leader)
        for sequence in self.scheduler.admit():
            sequence.slot = self.cache.open()
            sequence.times.started = perf_counter()

    def _outgrown(self, sequence: Sequence) -> bool:
        """Whether the sequence has crossed the length at which the model rotates every position differently (longrope)."""
        boundary = self.model.recompute_at
        return boundary is not None and sequence.total <= boundary < sequence.num_tokens and sequence.remaining > 0

    def _restart(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.cache.release(sequence.slot)
        sequence.slot = self.cache.open()
        sequence.num_computed, sequence.total, sequence.unread = 0, sequence.num_tokens, None

    def _fork(self, leader: Sequence) -> None:
        """Followers take the leader's past and run from here on; they wait where there is no room for all of them."""
        assert leader.slot is not None
        for follower in list(leader.followers):
            if len(self.scheduler.running) >= self.config.max_sequences or not self.cache.fits(
                follower.limit, [s.limit for s in self.scheduler.running]
            ):
                self.scheduler.waiting.appendleft(follower)
                continue
            follower.slot = self.cache.fork(leader.slot)
            follower.num_computed = leader.num_computed
            follower.times.started = leader.times.started
            self.scheduler.running.append(follower)
        leader.followers = []

    def _land(self, flight: Flight) -> list[Event]:
        drawn = flight.read()
        now = perf_counter()
        if flight.needs_commit:
            mx.eval(flight.state)
            for step in flight.steps:
                self.cache.commit(step)
        events: list[Event] = [Logits(s, rows) for s, rows in flight.logits.items() if s.finish_reason is None]
        self.speculator.landed(flight, drawn, now)
        for one in drawn:
            events += self._take(one, now)
        for sequence in flight.logits:
            if sequence.num_computed == sequence.num_tokens and not self._flying(sequence):
                self.abort(sequence, "stop")
        for work in flight.work:
            if work.sequence.finish_reason:
                self._release_if_landed(work.sequence)
        return events

    def _take(self, drawn: Drawn, now: float) -> list[Event]:
        """Append what a sequence got, and end it where one of the tokens is its last."""
        sequence = drawn.draw.sequence
        times = sequence.times
        times.first_token = times.first_token or now
        times.last_token = now
        events: list[Event] = []
        for i, token in enumerate(drawn.tokens):
            if sequence.finish_reason:
                break
            sequence.tokens.append(token)
            events.append(_token(drawn, i))
            if token in sequence.stop_ids:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                self.scheduler.remove(sequence)
        self.runner.settle(drawn, len(events))
        if len(sequence.tokens) == sequence.num_tokens:
            sequence.unread = None
        return events

    def _release_if_landed(self, sequence: Sequence) -> None:
        if sequence.slot is not None and not self._flying(sequence):
            self.cache.release(sequence.slot)
            sequence.slot = None
            self.speculator.forget(sequence)

    def _flying(self, sequence: Sequence) -> bool:
        return any(w.sequence is sequence for f in self._flights for w in f.work)

    def _cancel_all(self) -> None:
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            for s in (sequence, *sequence.followers):
                s.finish_reason = s.finish_reason or "cancelled"
                s.slot = None
        self._start()


def _token(drawn: Drawn, i: int) -> Token:
    sequence = drawn.draw.sequence
    wanted = sequence.params.logprobs
    if wanted is None or drawn.logprobs is None:
        return Token(sequence, drawn.tokens[i])
    chosen, top = drawn.logprobs[i]
    return Token(sequence, drawn.tokens[i], chosen, top[:wanted])
