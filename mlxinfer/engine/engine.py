"""The loop: schedule, run, read. One step is always submitted before the one before it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from ..cache.base import PAGE
from ..cache.kv_format import KVFormat
from ..cache.paged import PagedCache
from ..config import EngineConfig
from ..errors import MemoryPlanError
from ..models.decoder import Model
from ..types import EngineStats, FinishReason
from .events import Ended, Event, Logits, token_of
from .kv_cache_manager import KVCacheManager
from .model_runner import ModelRunner, PendingStep, SequenceOutput
from .prefill_budget import PrefillBudget, StepTimeModel
from .request_queue import RequestQueue
from .scheduler import Schedule, Scheduler
from .sequence import Sequence, ended_stats
from .spec_decode.draft_model import Drafter
from .spec_decode.proposer import Proposer

if TYPE_CHECKING:
    from ..cache.disk.storage import DiskStorage

_DISK_WAIT_S = 0.005
_OBSERVED = 4


class Engine:
    """Runs sequences to their end. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        dtype: mx.Dtype,
        kv: KVFormat | None = None,
        fingerprint: str = "",
        drafter: Drafter | None = None,
        disk: DiskStorage | None = None,
    ) -> None:
        """`fingerprint` names the weights, so that what is cached of one model is never used for another. `drafter` writes ahead of it.
        `disk`, of which no other engine makes use, keeps what is cached beyond this process."""
        self.drafter = drafter
        self.model = model
        self.config = config
        self.kv = kv or KVFormat()
        self.fingerprint = fingerprint
        self._disk = disk
        self._dtype = dtype
        self._ended = EngineStats()
        self._steps = 0
        self._start()

    def _start(self) -> None:
        config = self.config
        # Chunks of whole pages must have room beside an answer's row for everyone else.
        rows = (
            max(config.max_num_batched_tokens, config.max_sequences + PAGE - 1) if config.deterministic else config.max_num_batched_tokens
        )
        self.cache = PagedCache(
            self.model.layers,
            dtype=self._dtype,
            kv_cache_tokens=config.kv_cache_tokens,
            chunk=rows,
            kv=self.kv,
            fingerprint=self.fingerprint,
            prefix_cache_tokens=config.prefix_cache_tokens if config.prefix_cache else 0,
            snapshot_bytes=config.snapshot_bytes if config.prefix_cache else 0,
            disk=self._disk,
        )
        self.runner = ModelRunner(self.model, self.cache, deterministic=config.deterministic)
        self.times = StepTimeModel()
        self.scheduler = Scheduler(
            max_num_batched_tokens=rows,
            max_sequences=config.max_sequences,
            room=self.cache,
            pace=PrefillBudget(self.times, share=config.decode_share, max_step_s=config.max_step_s),
            waiting=RequestQueue(config.max_waiting),
            deterministic=config.deterministic,
        )
        drafts = config.max_draft if self.cache.can_fork and not config.deterministic else 0
        draft = self.drafter.start(config, self.model.vocab_size) if self.drafter and drafts else None
        self.speculator = Proposer(drafts, boundary=self.model.recompute_at, draft=draft, ngrams=config.ngrams)
        self.seats = KVCacheManager(self.model, config, self.cache, self.scheduler, self.speculator)
        self._flights: deque[PendingStep] = deque()
        self._landed_at = 0.0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._flights

    @property
    def reads_prompt(self) -> bool:
        """Whether the step that was submitted last does, and may take long."""
        return bool(self._flights) and self._flights[-1].rows > self._flights[-1].decode_rows

    def stats(self) -> EngineStats:
        usage = self.cache.usage()
        return replace(
            self._ended,
            steps=self._steps,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages=usage.pages,
            pages_used=usage.used,
            pages_cached=usage.cached,
        )

    def add(self, sequence: Sequence) -> None:
        """Put a sequence, and its followers, on the waiting list. Raises `MemoryPlanError` if it can never fit, and `QueueFullError`."""
        forks = self.cache.can_fork and len(sequence.prompt) > 1
        samples_to_fork = sequence.samples_to_fork
        if not forks:
            sequence.samples_to_fork = []
        for s in (sequence, *samples_to_fork):
            s.no_chunked_recompute = self.model.recompute_at is None and self.model.rotation(s.limit) != self.model.rotation(s.total)
        if not self.cache.fits(sequence.limit):
            raise MemoryPlanError(
                f"a sequence of up to {sequence.limit} tokens does not fit in the cache's memory: lower max_tokens or the context length"
            )
        for s in (sequence, *([] if forks else samples_to_fork)):
            self.scheduler.add(s)

    def tidy(self) -> bool:
        """To be called while there is nothing to do: True while that is of use."""
        return self.cache.tidy()

    def close(self, timeout_s: float = 2.0) -> None:
        """End all sequences, and write what is kept to disk, as far as that is done in this time."""
        self._end_all()
        self.cache.close(timeout_s)

    def abort(self, sequence: Sequence, reason: FinishReason = "cancelled") -> None:
        """End a sequence now; what it holds goes back as soon as no step in flight uses it."""
        for s in (sequence, *sequence.samples_to_fork):
            if s.finish_reason is None:
                self._finish(s, reason)
            self.scheduler.remove(s)
            self._release_if_landed(s)

    def step(self) -> list[Event]:
        """Submit the next step and read the one before it. After any exception, all sequences are cancelled and the engine is fresh."""
        try:
            events = self._land_if(self._must_land)
            events += self._expire()
            self.seats.admit(flying=bool(self._flights))
            self.cache.tidy(idle=False)
            self.speculator.propose(self.scheduler.running)
            schedule = self._scheduled(events)
            if schedule.work:
                self._flights.append(self.runner.launch(schedule.work))
            elif not self._flights and not events:
                self.cache.wait(_DISK_WAIT_S)
            return events + self._land_if(lambda: len(self._flights) > (1 if schedule.work else 0))
        except BaseException:
            self._cancel_all()
            raise

    def _scheduled(self, events: list[Event]) -> Schedule:
        """The next step's work. Where pages run out, the sequences that have to give theirs back do so first."""
        while True:
            schedule = self.scheduler.schedule()
            if not schedule.preempt:
                return schedule
            events += self._land_if(lambda: bool(self._flights))
            for sequence in schedule.preempt:
                if sequence in self.scheduler.running:
                    self.seats.preempt(sequence)

    def _must_land(self) -> bool:
        """Whether the step in flight has to be finished first: it fills pages, verifies drafts or should be followed by some, or a
        sequence has to be computed anew, or pages have come from disk."""
        if not self._flights:
            return False
        flight, running = self._flights[-1], self.scheduler.running
        if self.cache.arrived:
            return True
        return flight.needs_commit or flight.drafted or any(map(self.seats.outgrown, running)) or self.speculator.promising(running)

    def _land_if(self, condition: Callable[[], bool]) -> list[Event]:
        events: list[Event] = []
        while condition():
            events += self._land(self._flights.popleft())
        return events

    def _expire(self) -> list[Event]:
        expired = self.scheduler.expired(perf_counter())
        for sequence in expired:
            self.abort(sequence, "timeout")
        return [Ended(sequence) for sequence in expired]

    def _land(self, flight: PendingStep) -> list[Event]:
        drawn = flight.read()
        now = perf_counter()
        self._observe(flight, now)
        self.speculator.landed(flight, drawn, now)
        if flight.needs_commit:
            mx.eval(flight.state)
            self._commit(flight)
        for step in flight.steps:
            step.close()
        events: list[Event] = [Logits(s, rows, past) for s, (past, rows) in flight.logits.items() if s.finish_reason is None]
        for one in drawn:
            events += self._take(one, now)
        for sequence in flight.logits:
            if sequence.num_computed_tokens == sequence.num_tokens and not self._flying(sequence):
                self.abort(sequence, "stop")
        for work in flight.work:
            if work.sequence.finish_reason:
                self._release_if_landed(work.sequence)
            elif work.sequence.num_computed_tokens in work.sequence.snapshot_points and not self._flying(work.sequence):
                self.seats.keep(work.sequence)
        return events

    def _observe(self, flight: PendingStep, now: float) -> None:
        """A step takes from the landing of the one before it, or from its own launch if the device was idle. Of steps with nothing but
        answers a few tell as much as all."""
        prefill_rows = flight.rows - flight.decode_rows
        if prefill_rows or not self._steps % _OBSERVED or not self.times.alone.knows(flight.decode_rows):
            self.scheduler.pace.observe(flight.decode_rows, prefill_rows, now - max(flight.launched, self._landed_at))
        self._landed_at = now
        self._steps += 1

    def _commit(self, flight: PendingStep) -> None:
        tokens = {s.slot: s.tokens for s in (w.sequence for w in flight.work) if s.slot is not None and self._may_share(s)}
        for step in flight.steps:
            self.cache.commit(step, tokens)

    def _may_share(self, sequence: Sequence) -> bool:
        """Whether the pages that it has just filled are those that any other would have computed. To the bit that goes only for pages of a
        prompt, without its last token."""
        return not self.config.deterministic or sequence.num_computed_tokens < len(sequence.prompt)

    def _take(self, drawn: SequenceOutput, now: float) -> list[Event]:
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
            events.append(token_of(drawn, i))
            if token in sequence.stop_ids:
                self._finish(sequence, "stop")
            elif len(sequence.tokens) >= sequence.limit:
                self._finish(sequence, "length")
        if sequence.finish_reason:
            self.scheduler.remove(sequence)
        self.runner.settle(drawn, len(events))
        if len(sequence.tokens) == sequence.num_tokens:
            sequence.pending_token = None
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._ended += ended_stats(sequence)

    def _release_if_landed(self, sequence: Sequence) -> None:
        if sequence.slot is not None and not self._flying(sequence):
            self.seats.release(sequence)

    def _flying(self, sequence: Sequence) -> bool:
        return any(w.sequence is sequence for f in self._flights for w in f.work)

    def _end_all(self) -> None:
        self._land_if(lambda: bool(self._flights))
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.abort(sequence)

    def _cancel_all(self) -> None:
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            for s in (sequence, *sequence.samples_to_fork):
                s.finish_reason = s.finish_reason or "cancelled"
                s.slot = None
        self._start()
