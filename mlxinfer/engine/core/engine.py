"""The loop: seal, admit, schedule, submit, collect. The device computes a step while the next one is built and submitted."""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter
from traceback import clear_frames
from typing import TYPE_CHECKING

import mlx.core as mx

from ...cache.attention.select import fallback_lines
from ...cache.kv_format import KVFormat
from ...cache.paged import PagedCache
from ...config import EngineConfig
from ...errors import ExpertReadError, ImageError, MemoryPlanError, SamplingError, one_line
from ...kernels_metal.kernel_trial import lost_lines
from ...models.decoder import Model
from ...types import EngineStats, FinishReason
from ..runner.kernel_fallback import TakeMemory, disable_guilty, unpack_once
from ..runner.model_runner import ModelRunner, PendingStep
from ..spec_decode.draft_model import Drafter
from ..spec_decode.drafter import TokenDrafter
from ..spec_decode.proposer import Proposer
from .chunk_policy import chunk_policy
from .events import Ended, Event, StepReport, result_event, token_events
from .kv_cache_manager import KVCacheManager
from .prefill_budget import PrefillBudget
from .request_queue import RequestQueue
from .rope_regime import RopeRegime
from .schedule import Schedule, ScheduledSequence
from .scheduler import Scheduler
from .sequence import EXPERTS_FAILED, Sequence, ended_stats
from .step_times import StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...adapters.adapted_model import AdaptedModel
    from ...cache.disk.backend import PageSource
    from ...cache.kv_events import KVEventSink
    from ...loading.repack_cache.pooled_experts import PooledExperts
    from ...loading.vision import Vision
    from ..runner.gpu_faults import GpuFaults
    from ..runner.replay_check import ReplayCheck
    from .image_encoder import ImageEncoder

_DISK_WAIT_S = 0.005
"""Seconds to wait for the disk if there is nothing else to do."""
_PREPARATION_S = 0.002
"""Most seconds before its submission that count as part of a step; the reader of the answers spent the rest."""
_LEARNING, _SAMPLED = 64, 4
"""After `_LEARNING` steps, one in `_SAMPLED` steps without prompts and drafts is enough to learn the time of a step."""

_log = logging.getLogger(__name__)


class Engine:
    """Runs sequences to their end. Not thread-safe: it belongs to one thread."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        dtype: mx.Dtype,
        kv: KVFormat | None = None,
        fingerprint: str = "",
        drafter: Drafter | None = None,
        disk: PageSource | None = None,
        take_memory: TakeMemory = lambda wanted: 0,
        adapted: AdaptedModel | None = None,
        make_cache: Callable[..., PagedCache] = PagedCache,
        vision: Vision | None = None,
        check: ReplayCheck | None = None,
        experts: PooledExperts | None = None,
    ) -> None:
        """`dtype`: of activations, keys and values. `kv`: format of full pages. `fingerprint` identifies the weights, so that no model uses
        the cached prefixes of another. `drafter` proposes tokens. `disk` stores cached prefixes beyond this process, or reads those of
        another machine; no other engine may use it. `take_memory` grants memory if weights become larger than planned. `adapted`: the
        model with its adapters. `make_cache` creates every new cache, with the arguments of `PagedCache`. `vision` encodes images. `check`
        decides when steps are replayed on a GPU. `experts` are the pools of the model's routed experts."""
        self.drafter = drafter
        self.model = model
        self.config = config
        self.kv = kv or KVFormat()
        self.fingerprint = fingerprint
        self._disk = disk
        self._adapted = adapted
        self._take_memory = take_memory
        self._make_cache = make_cache
        self._dtype = dtype
        self.encoder = None if vision is None else _encoder(vision, dtype, config)
        self._ended = EngineStats()
        self.experts = experts
        self._steps, self._replays, self._check = 0, True, check
        self._gpu_faults: GpuFaults | None = None
        self._kv_events: KVEventSink | None = None
        self.watch: Callable[[StepReport], None] | None = None
        """Called with a report of every step, for observers; it must not change anything."""
        self._start()

    def _start(self) -> None:
        config = self.config
        rope = RopeRegime(self.model)
        chunks = chunk_policy(self.model, config, rope)
        rows = chunks.step_rows(config.max_num_batched_tokens, config.max_num_seqs)
        self.cache = self._make_cache(
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
        encoder, features = self.encoder, None
        if encoder is not None:
            encoder.reset()
            features = encoder.features
        self.runner = ModelRunner(
            self.model,
            self.cache,
            apart=chunks.apart,
            adapted=self._adapted,
            replays=self._replays,
            check=self._check,
            features=features,
            experts=self.experts,
        )
        self._prefill_rows = 0, 0  # of the last two steps
        self.times = StepTimes()
        self.scheduler = Scheduler(
            max_num_batched_tokens=rows,
            max_num_seqs=config.max_num_seqs,
            max_scored_rows=config.max_scored_rows,
            pages=self.cache,
            budget=PrefillBudget(self.times, share=config.decode_share, max_step_s=config.max_step_s),
            waiting=RequestQueue(config.max_waiting),
            chunks=chunks,
        )
        if self._gpu_faults is not None:
            self.scheduler.budget.most_rows = self._gpu_faults.most_rows
        max_draft = config.max_draft if self.cache.can_fork and chunks.drafts else 0
        draft: TokenDrafter | None = None
        if self.model.mtp is not None and max_draft:
            from ..spec_decode.head_drafter import HeadDrafter

            draft = HeadDrafter(self.model, self.cache, self.runner.noise)
        elif self.drafter and max_draft:
            draft = self.drafter.start(config, self.model.vocab_size)
        self.proposer = Proposer(max_draft, self.times, rope, draft=draft, ngrams=config.ngrams)
        self.kv_cache_manager = KVCacheManager(self.cache, self.scheduler, rope, chunks, prefix_cache=config.prefix_cache, encoder=encoder)
        if self._kv_events:
            self.cache.send_events(self._kv_events)
        self._chunks = chunks
        self._pending: PendingStep | None = None
        self._collected_at = 0.0

    @property
    def idle(self) -> bool:
        """True if no sequence runs or waits, and no step is pending."""
        return self.scheduler.idle and self._pending is None

    @property
    def reads_prompt(self) -> bool:
        """True if the pending step reads prompts, so that it may take long."""
        return self._pending is not None and self._pending.schedule.prefill_rows > 0

    def stats(self) -> EngineStats:
        """Totals of all ended sequences, and the present state."""
        usage, reads = self.cache.usage(), {} if self.experts is None else self.experts.counts()
        sequences = {"running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting)}
        pages = {"pages": usage.pages, "pages_used": usage.used, "pages_cached": usage.cached}
        return replace(self._ended, steps=self._steps, **sequences, **pages, **reads)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, and the samples that fork from it. Raises `MemoryPlanError` if it can never fit, `SamplingError` if its
        adapter was unloaded, `ImageError` for images without a tower, and `QueueFullError`; then nothing has changed."""
        if sequence.images is not None and self.encoder is None:
            raise ImageError("the prompt has images, but the model was loaded without a vision tower")
        if sequence.adapter is not None and not sequence.adapter.slot:
            raise SamplingError(f"adapter: {sequence.adapter.name!r} was unloaded before the request began")
        if not self.cache.fits(sequence.max_length):
            message = f"a sequence of up to {sequence.max_length} tokens does not fit in the cache's memory"
            raise MemoryPlanError(f"{message}: lower max_tokens or the context length")
        apart = [] if self.cache.can_fork and sequence.can_fork else sequence.samples_to_fork
        self.scheduler.waiting.check(1 + len(apart))
        if apart:
            sequence.lead([])
        for each in (sequence, *apart):
            self.scheduler.add(each)

    def adapt(self, adapted: AdaptedModel | None) -> None:
        """Use adapters that were loaded or unloaded since the last step."""
        self._adapted = self.runner.adapted = adapted
        self._release_adapters()

    def send_kv_events(self, sink: KVEventSink) -> None:
        """Report the contents of the prefix cache to `sink`, and from now on every change, a new start of the cache included."""
        self._kv_events = sink
        self.cache.send_events(sink)

    def tidy(self) -> bool:
        """Do some work that can wait. Call it while the engine is idle, as long as it returns True."""
        if self.encoder is not None and self.encoder.busy:
            self.encoder.due()  # nobody needs an image any more
        if self.experts is not None and self._pending is None:
            self.experts.resize()
        return self.cache.tidy()

    def close(self, timeout_s: float = 2.0) -> None:
        """End all sequences, and write cached prefixes to disk for up to `timeout_s`."""
        self._collect_pending([])
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.abort(sequence)
        self.cache.close(timeout_s)

    def abort(self, sequence: Sequence, reason: FinishReason = "cancelled") -> None:
        """End a sequence now. Its slot is freed once no pending step uses it."""
        for each in (sequence, *sequence.samples_to_fork):
            if each.finish_reason is None:
                each.finish(reason)
                self._ended += ended_stats(each)
            self.scheduler.remove(each)
            self._free_if_unused(each)
        self._release_adapters()

    def step(self) -> list[Event]:
        """Advance all sequences by one step. If the GPU aborts it, they are computed again; if a GPU kernel fails, without it. If experts
        cannot be read, running sequences end with the error. After any other exception all are cancelled, and the engine restarts empty."""
        events: list[Event] = []
        try:
            self._advance(events)
        except ExpertReadError as error:
            self._fail_running(error, events)
        except BaseException as error:
            if not self._retry(error):
                self._cancel_all()
                if self._gpu_faults is not None:
                    self._gpu_faults.explain(error)
                raise
        self._release_adapters()
        return events

    def _advance(self, events: list[Event]) -> None:
        """One step. Results are added to `events` at once: if the step fails later, their sequences have them."""
        if self._must_collect():
            self._collect_pending(events)
        if self.experts is not None and self._pending is None:
            self.experts.resize()
        self.cache.tidy(idle=False, store=self._pending is None)
        self._seal_ahead()
        self._admit(events)
        if self.encoder is not None and self.encoder.busy:
            self._encode(self.encoder, events)
        schedule = self._schedule(events)
        before = self._submit(schedule, idle=not events)
        self._collect(before, events)
        if self._pending is not None and self._pending.logits_to_sample is not None:
            self.runner.sample(self._pending)

    def _must_collect(self) -> bool:
        """True if the pending step must be collected before the next one is scheduled.

        That is so if it verifies drafts, if drafts should follow its tokens, if it is the first to measure prompts, if it ends at a
        snapshot point, if a sequence must be computed again, if pages have arrived from disk, or if pools of experts must be resized."""
        pending, running = self._pending, self.scheduler.running
        if pending is None:
            return False
        if pending.schedule.drafts or self.cache.arrived or (self.experts is not None and self.experts.must_resize):
            return True
        if pending.schedule.prefill_rows and (self.scheduler.must_measure(pending.schedule) or pending.schedule.at_snapshot):
            return True
        if self.kv_cache_manager.restarts and any(map(self.kv_cache_manager.must_restart, running)):
            return True
        return self.proposer.wants_tokens(running)

    def _admit(self, events: list[Event]) -> None:
        """End sequences that are out of time, and admit waiting ones."""
        for sequence in self.scheduler.expired(perf_counter()):
            self.abort(sequence, "timeout")
            events.append(Ended(sequence))
        manager = self.kv_cache_manager
        if self.scheduler.waiting.sequences or manager.leaders or manager.restarts:
            manager.admit(between_steps=self._pending is None)

    def _encode(self, encoder: ImageEncoder, events: list[Event]) -> None:
        """Run the vision tower for a while, if an image is due and running answers keep their share of the time. The pending step is
        collected first: its tokens do not wait."""
        running, budget = self.scheduler.running, self.scheduler.budget
        answers = any(s.num_computed_tokens >= len(s.prompt) for s in running)
        if not encoder.due() or (answers and not budget.may_spend()):
            return
        self._collect_pending(events)
        began, alone = perf_counter(), all(map(encoder.waits, running))
        failed = encoder.run(self.config.max_step_s if alone else self.config.max_step_s / 2)
        if answers:
            budget.spend(perf_counter() - began)
        for sequence, error in failed:
            self._fail(sequence, error, events)
            self.abort(sequence)

    def _fail(self, sequence: Sequence, error: str, events: list[Event]) -> None:
        """End a sequence, and the samples that fork from it, with an error."""
        for each in (sequence, *sequence.samples_to_fork):
            if each.finish_reason is None:
                each.fail(error)
                events.append(Ended(each))
                self._ended += ended_stats(each)

    def _schedule(self, events: list[Event]) -> Schedule:
        """The next step, with drafts. If pages run out, the pending step is collected, which adds to `events`, and sequences are
        preempted."""
        self.proposer.propose(self.scheduler.running)
        while (schedule := self.scheduler.schedule()).preempt:
            self._collect_pending(events)
            for sequence in schedule.preempt:
                if sequence in self.scheduler.running:
                    self.kv_cache_manager.preempt(sequence)
                    self.proposer.forget(sequence)
        return schedule

    def _submit(self, schedule: Schedule, *, idle: bool) -> PendingStep | None:
        """Start the next step, if there is one, and return the pending one. If there is neither, and `idle`, wait for the disk."""
        before, self._pending = self._pending, None
        if schedule.work:
            self._prefill_rows = self._prefill_rows[1], schedule.prefill_rows
            self._pending = self.runner.submit(schedule, before)
        elif before is None and idle and (self.encoder is None or not self.encoder.busy):
            self.cache.wait(_DISK_WAIT_S)
        return before

    def _collect_pending(self, events: list[Event]) -> None:
        pending, self._pending = self._pending, None
        self._collect(pending, events)

    def _collect(self, step: PendingStep | None, events: list[Event]) -> None:
        """Wait for a step, learn from it, and give its sequences their tokens."""
        if step is None:
            return
        step.wait()
        sampled = step.collect()
        if self.experts is not None:
            self.experts.check(waits=step.sampled is None)
        now, began = perf_counter(), max(self._collected_at, step.submitted)
        self._learn(step, sampled, now)
        self._seal(step)
        self.cache.submit()
        step.close()
        before = len(events)
        self._emit(step, sampled, now, events)
        if self.watch is not None:
            self.watch(StepReport(step.schedule, events[before:], began, now, len(self.scheduler.waiting)))

    def _learn(self, step: PendingStep, sampled: list[ScheduledSequence], now: float) -> None:
        """Learn the step's duration: from the collection of the step before, or from its own submission if the device was idle."""
        waited = step.submitted >= self._collected_at
        seconds = now - max(self._collected_at, step.submitted - _PREPARATION_S)
        self._collected_at = now
        self._steps += 1
        schedule = step.schedule
        turns = self.proposer.learn(step, sampled, seconds)
        plain = not (schedule.prefill_rows or waited or turns)
        if not plain or self._steps < _LEARNING or not self._steps % _SAMPLED:
            self.times.observe(schedule.decode_rows, schedule.prefill_rows, seconds, waited=waited, turns=turns)
        if schedule.prefill_rows:
            self.scheduler.budget.observe(schedule.decode_rows, schedule.prefill_rows, seconds)

    def _seal_ahead(self) -> None:
        """Assign places to the pages that the pending step fills, before it ends: all their tokens are known. The next step can then be
        built meanwhile. Nothing is written yet (`ModelRunner.submit`)."""
        pending = self._pending
        if pending is None or not pending.needs_commit:
            return
        self._seal(pending)

    def _seal(self, step: PendingStep) -> None:
        if step.sealed or not step.needs_commit:
            return
        step.sealed = True
        sequences = [w.sequence for w in step.schedule.work]
        tokens = {s.slot: s.keys() for s in sequences if s.slot is not None and self._chunks.may_share(s)}
        for each in step.passes:
            self.cache.seal(each, tokens)

    def _emit(self, step: PendingStep, sampled: list[ScheduledSequence], now: float, events: list[Event]) -> None:
        """Append the results to their sequences, report these as events, and end finished sequences."""
        events += [result_event(w) for w in step.read if w.sequence.finish_reason is None]
        for w in sampled:
            s = w.sequence
            had_ended = s.finish_reason is not None
            appended = s.append(w.new_tokens, now, w.num_drafts)
            events += token_events(w, appended)
            if w.num_drafts and s.slot is not None:
                self.cache.verified(s.slot, max(appended, 1))
            if s.finish_reason and not had_ended:
                if not appended:
                    events.append(Ended(s))
                self._ended += ended_stats(s)
                self.scheduler.remove(s)
        for w in step.read:
            s = w.sequence
            if s.num_computed_tokens == s.num_tokens and not self._is_pending(s):
                self.abort(s, "stop")
        for w in step.schedule.work:
            s = w.sequence
            if s.finish_reason:
                self._free_if_unused(s)
            elif s.snapshot_points and s.num_computed_tokens in s.snapshot_points and not self._is_pending(s):
                self.kv_cache_manager.cache_prefix(s)

    def _release_adapters(self) -> None:
        if self._adapted is not None and self._adapted.leaving:
            self._adapted.release([s.adapter for s in (*self.scheduler.running, *self.scheduler.waiting) if s.adapter is not None])

    def _free_if_unused(self, sequence: Sequence) -> None:
        if sequence.slot is not None and not self._is_pending(sequence):
            self.kv_cache_manager.free(sequence)
            self.proposer.forget(sequence)

    def _is_pending(self, sequence: Sequence) -> bool:
        return self._pending is not None and any(w.sequence is sequence for w in self._pending.schedule.work)

    def _retry(self, error: BaseException) -> bool:
        """True if a GPU aborted the step, or its kernels may have caused the error: plain MLX replaces these from now on. The engine
        restarts with the same sequences, which recompute their known tokens, as after a preemption."""
        faults = self._gpu_faults = self._gpu_faults or _gpu_faults()
        if faults.may_retry(error, self.scheduler.running, max(self._prefill_rows)):
            rows = faults.most_rows()
            fewer = "" if rows is None else f", prompts in steps of at most {rows} rows"
            _log.warning("the GPU aborted a step (%s), which is computed again%s", one_line(error), fewer)
            faults.drain()
            self._restart(error)
            return True
        drafts = self.proposer.draft
        layers = [*self.cache.attention, *(drafts.cache.attention if drafts else ())]
        if not disable_guilty(error, layers, replays=self.runner.replays):
            return False
        self._replays = self._replays and not self.runner.replays
        models = [self.model] + ([self.drafter.model] if self.drafter else [])
        unpacking, self.config, cost = unpack_once(models, self.config, self._dtype, self.kv, self._take_memory)
        lines = [*fallback_lines(self.model.layers, self.kv, self._dtype), *lost_lines(), *["all steps are built"][self._replays :], *cost]
        _log.warning("a step failed (%s) and is computed again; %s", one_line(error), "; ".join(lines) or "drafts use plain MLX")
        del layers, drafts
        self._restart(error)
        unpacking.run()
        return True

    def _fail_running(self, error: ExpertReadError, events: list[Event]) -> None:
        """End all running sequences with an error. Waiting ones start with an empty cache: the failed step has written garbage."""
        _log.warning("a step failed (%s)", one_line(error))
        for running in list(self.scheduler.running):
            self._fail(running, EXPERTS_FAILED + str(error), events)
            self.scheduler.remove(running)
            running.detach()
        if self.experts is not None:
            self.experts.forget_fault()
        self._restart(error)

    def _restart(self, error: BaseException) -> None:
        """Begin again with the same sequences."""
        before = self.scheduler
        for sequence in list(before.running):
            if sequence.finish_reason:  # complete, but the step failed before its removal
                self._ended += ended_stats(sequence)
                before.remove(sequence)
            sequence.preempt()
        self._start()
        self.scheduler.inherit(before)
        del before
        clear_frames(error.__traceback__)  # its frames refer to the old cache

    def _cancel_all(self) -> None:
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            for each in (sequence, *sequence.samples_to_fork):
                each.finish("cancelled")
                each.detach()
        self._start()


def _gpu_faults() -> GpuFaults:
    from ..runner.gpu_faults import GpuFaults  # only after a failure

    return GpuFaults()


def _encoder(vision: Vision, dtype: mx.Dtype, config: EngineConfig) -> ImageEncoder:
    from .image_encoder import ImageEncoder  # only for models that see

    return ImageEncoder(vision.tower, dtype, config.image_features_bytes, whole_pages=config.deterministic)
