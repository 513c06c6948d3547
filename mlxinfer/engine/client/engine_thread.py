"""The thread that owns MLX: it loads the model, runs the engine and delivers the answers."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx

from ...errors import EngineError, GpuFaultError, MLXInferError, SettingError
from ...types import EngineStats
from ...util.device import clear_cache
from ..core.sequence import Sequence
from ..model_base import FORKED
from ..open_model import OpenModel
from ..text.output_processor import Output, OutputProcessor, fault_line, stopped
from ..text.pooled_output import PooledOutput
from .async_request import Outbox, Piece, Request

if TYPE_CHECKING:
    from ...cache.disk.kv_export import KVExport
    from ...cache.kv_events import KVEventSink

Result = TypeVar("Result")

Command = Callable[[], None]
Progress = Callable[[int, int], None]

_RESTARTS, _WITHIN_S = 1, 3600.0
"""Restarts of a failed engine within `_WITHIN_S` seconds. An engine that fails again at once is broken; a GPU may run out of time or memory
every few days."""
_STATS_EVERY_S = 0.05
_EXIT_PATIENCE_S = 10.0
"""Seconds to wait at interpreter exit for the step in progress."""

_CLOSED = "this AsyncLLM is closed: create a new one"

_log = logging.getLogger(__name__)


class ReusedThreads:
    """Runs each job in an idle daemon thread, or else in a new one. MLX keeps a stream for every thread that ever computed, though the
    thread has ended: 17 KB each on Linux's CPU, and 30 KB if the thread has loaded a model."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._idle: list[SimpleQueue[Command]] = []
        os.register_at_fork(after_in_child=self._forget)

    def run(self, job: Command) -> None:
        """Start a job. An exception that it raises ends its thread."""
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = SimpleQueue()
            Thread(target=self._serve, args=(jobs,), name=self._name, daemon=True).start()
        jobs.put(job)

    def _serve(self, jobs: SimpleQueue[Command]) -> None:
        while True:
            _call(jobs.get())
            with self._lock:
                self._idle.append(jobs)

    def _forget(self) -> None:
        """A forked child has no threads."""
        self._lock = Lock()
        self._idle.clear()


def _call(job: Command) -> None:
    """A separate function, so that no local variable keeps the job alive."""
    job()


_THREADS = ReusedThreads("mlxinfer engine")


class _Closed(BaseException):
    """Loading was cancelled. Not an `Exception`, so that no handler mistakes it for a fault of the checkpoint."""


class EngineThread:
    """A thread that loads a model and runs its engine. Any thread may call the public methods; private ones run in the thread itself.

    A fault (anything but a user's error) ends all requests with `EngineError`, and the engine restarts, once an hour. After a second fault
    it stays down. The thread executes commands between two steps, and waits for them when there is nothing to compute.
    """

    def __init__(self, open_model: Callable[[Progress], OpenModel], progress: Progress | None) -> None:
        self.opened: Future[OpenModel] = Future()
        self.opened.set_running_or_notify_cancel()  # so that no waiting caller can cancel it
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()
        self.stats = EngineStats()
        self.process = os.getpid()
        """Id of the process with the thread: a forked child does not have it."""
        self._open_model = open_model
        self._progress = progress
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._outbox = Outbox()
        self._outputs: OutputProcessor | None = None
        self._requests: dict[Sequence, Request] = {}
        """Requests by sequence that has not ended."""
        self._kv_events: KVEventSink | None = None
        self._gate = Lock()
        """Prevents sending requests after the end."""
        self._over = ""
        self._closing = False
        self._down = ""
        self._restarts = 0
        self._faults: list[float] = []
        """Times of recent faults, in seconds of `perf_counter`."""
        self._before = EngineStats()
        self._stats_at = 0.0
        # A daemon: the interpreter joins other threads before it calls the `atexit` function that stops this one.
        atexit.register(self.stop_at_exit)
        _THREADS.run(self._run)

    def send(self, request: Request) -> None:
        """Run a request; its pieces are delivered in its event loop. Raises `EngineError` after the end."""
        if os.getpid() != self.process:
            raise EngineError(FORKED)
        with self._gate:
            if self._over:
                raise EngineError(self._over)
            self._commands.put(partial(self._submit, request))

    def compute(self, function: Callable[[], Result]) -> Result:
        """Call a function in this thread, between two steps, and return its result. Its exceptions are raised here; any but a user's error
        is also a fault of the engine."""
        result: Future[Result] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
                if not isinstance(error, MLXInferError):
                    raise

        with self._gate:
            if self._over:
                raise EngineError(self._over)
            self._commands.put(run)
        return result.result()

    def change_adapters(self, change: Callable[[], None]) -> None:
        """Load or unload adapters of the model between two steps. Raises the errors of `change`."""

        def run() -> None:
            change()
            if self._outputs is not None:
                self._outputs.engine.adapt(self.opened.result().adapters.adapted)

        self.compute(run)

    def shrink_experts(self, nbytes: int) -> int:
        """Free up to `nbytes` of the pools of experts between two steps. Returns the bytes that are free."""
        guard = self.opened.result().guard
        if guard is None:
            return 0
        before = guard.allowed
        self.compute(partial(guard.give, nbytes))
        self.compute(lambda: None)  # the pools are resized before
        return max(before - guard.allowed, 0)

    def hand_out(self, function: Callable[[KVExport], Result]) -> Result:
        """Call a function with the exporter of pages, between two steps. Raises `SettingError` if this model exports none."""

        def run() -> Result:
            opened, export = self.opened.result(), None
            if self._outputs is not None and opened.args.kv_producer:
                export = self._outputs.engine.cache.kv_export
            if export is None:
                raise SettingError("this model's pages are not handed out: start the server with --kv-producer")
            return function(export)

        return self.compute(run)

    def send_kv_events(self, sink: KVEventSink) -> None:
        """Start between two steps, and continue after a restart. `sink` is called in this thread and in threads of the disk."""

        def begin() -> None:
            self._kv_events = sink
            if self._outputs is not None:
                self._outputs.engine.send_kv_events(sink)

        self._commands.put(begin)

    def cancel(self, request: Request) -> None:
        """End a request between two steps. Harmless if it has ended."""
        if not request.cancelled:
            request.cancelled = True
            self._commands.put(partial(self._cancel, request))

    def give_up(self, reason: str) -> None:
        """End all requests although the thread may hang; the process should end soon."""
        self._over = self._over or reason
        for request in set(self._requests.values()):
            with suppress(RuntimeError):  # its loop is closed
                request.loop.call_soon_threadsafe(request.take, stopped(reason))

    def close(self) -> None:
        """End everything after the running step; `ended` is then done."""
        self._closing = True
        self._commands.put(lambda: None)

    def stop_at_exit(self) -> None:
        self.close()
        wait([self.ended], _EXIT_PATIENCE_S)

    def _run(self) -> None:
        opened: OpenModel | None = None
        try:
            opened = self._open()
            if opened is not None:
                self._serve(opened)
        finally:
            if self._outputs is not None:
                self._outputs.engine.close()
            if opened is not None:
                opened.close()
            opened = self._outputs = None
            self._end()

    def _end(self) -> None:
        if self._closing:
            self._down = _CLOSED
        with self._gate:
            self._over = self._down or "the engine is down"
        self._fail_all(self._over)
        self._take_commands()
        if self.opened.exception() is None:  # drop the model
            self.opened = Future()
            self.opened.set_exception(EngineError(self._over))
        clear_cache()
        atexit.unregister(self.stop_at_exit)
        self.ended.set_result(None)

    def _open(self) -> OpenModel | None:
        try:
            opened = self._open_model(self._report_progress)
        except MLXInferError as error:
            self._down = str(error)
            self.opened.set_exception(error)
        except BaseException as error:
            self._down = _CLOSED if isinstance(error, _Closed) else f"the model could not be loaded: {fault_line(error)}"
            self.opened.set_exception(EngineError(self._down))
            if not isinstance(error, _Closed):
                raise
        else:
            self.opened.set_result(opened)
            return opened
        return None

    def _report_progress(self, done: int, total: int) -> None:
        if self._closing:
            raise _Closed
        if self._progress:
            self._progress(done, total)

    def _serve(self, opened: OpenModel) -> None:
        while not self._closing:
            try:
                self._outputs = OutputProcessor(opened.engine(), opened.loaded.tokenizer)
                if opened.guard is not None:
                    opened.guard.wake = self._wake
                if self._kv_events:
                    self._outputs.engine.send_kv_events(self._kv_events)
                self._loop(self._outputs)
            except Exception as error:
                self._fail_all(fault_line(error))
                self._before, self._restarts, now = self.stats.without_experts(), self._restarts + 1, perf_counter()
                if not isinstance(error, GpuFaultError):  # other programs caused it, or the request was too long
                    self._faults = [*(at for at in self._faults if now - at < _WITHIN_S), now]
                if len(self._faults) > _RESTARTS:
                    self._down = f"the engine is down, as it failed again after a restart: {fault_line(error)}"
                    self.stats = replace(self.stats, running=0, waiting=0)
                    raise
                _log.exception("the engine failed and starts again")
                if self._outputs is not None:
                    self._outputs.engine.close(timeout_s=0)
                self._outputs = None
                clear_cache()

    def _loop(self, outputs: OutputProcessor) -> None:
        self._publish(outputs)
        while not self._closing:
            if outputs.engine.idle:
                self._publish(outputs)
                while self._commands.empty() and outputs.engine.tidy():
                    pass  # each call copies data for the disk
                self._commands.get()()
            self._take_commands()
            if not outputs.engine.idle:
                self._step(outputs)

    def _wake(self) -> None:
        """Have an idle engine do work that can wait."""
        self._commands.put(lambda: None)

    def _take_commands(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def _step(self, outputs: OutputProcessor) -> None:
        ended = False
        for answer, chunk in outputs.step():
            request = self._requests.get(answer.sequence)
            if request is None:
                continue
            if request.streams:
                self._outbox.put(request, chunk)
            if chunk.finish_reason:
                del self._requests[answer.sequence]
                ended = True
                if not request.streams:
                    self._outbox.put(request, self._result_of(request, answer, outputs))
        now = perf_counter()
        if ended or now - self._stats_at > _STATS_EVERY_S:
            self._publish(outputs)
        if outputs.engine.reads_prompt or self._outbox.due(now):
            self._send()

    def _result_of(self, request: Request, answer: Output, outputs: OutputProcessor) -> Piece:
        if isinstance(answer, PooledOutput) and answer.vector is not None:
            return answer.vector
        if not request.wants_logits:
            return answer.completion()
        logits = mx.concatenate(outputs.rows.pop(answer.sequence))
        mx.eval(logits)
        return logits

    def _send(self) -> None:
        for request in self._outbox.send():
            self._cancel(request)

    def _submit(self, request: Request) -> None:
        if request.cancelled:
            return
        self._requests.update((s, request) for s in request.sequences)
        if self._over or self._outputs is None:
            self._fail_all(self._over or "it starts again")
            return
        try:
            request.answers = self._outputs.submit(request.sequences)
            if request.wants_logits:
                self._outputs.rows.update((sequence, []) for sequence in request.sequences)
        except MLXInferError as error:
            self._forget(request)
            self._outbox.put(request, error)
            self._send()

    def _cancel(self, request: Request) -> None:
        self._forget(request)
        if self._outputs is not None:
            self._outputs.cancel(request.answers)
            for sequence in request.sequences:
                self._outputs.rows.pop(sequence, None)

    def _forget(self, request: Request) -> None:
        for sequence in request.sequences:
            self._requests.pop(sequence, None)

    def _fail_all(self, reason: str) -> None:
        for request in dict.fromkeys(self._requests.values()):
            self._outbox.put(request, stopped(reason))
        self._requests.clear()
        self._outbox.send()

    def _publish(self, outputs: OutputProcessor) -> None:
        self._stats_at = perf_counter()
        self.stats = replace(self._before + outputs.engine.stats(), restarts=self._restarts)
