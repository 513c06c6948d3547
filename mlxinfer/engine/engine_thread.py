"""The one thread that owns MLX: it loads the model, runs the engine, and hands out what the answers get."""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Union

import mlx.core as mx

from ..errors import EngineError, MLXInferError
from ..types import Chunk, Completion, EngineStats
from .output_processor import Output, OutputProcessor
from .sequence import Sequence
from .settings import OpenModel

Piece = Union[Chunk, Completion, MLXInferError]

_EVERY_S = 1 / 30
"""Pieces of running answers are handed over so often at most: faster than anybody reads. To wake a loop for each token of a small
model takes 5 % of its speed on two cores."""


class Request:
    """What an answer's reader waits on. Pieces that nobody has taken yet wait here, at most `max_tokens` of them: a slow reader never
    holds up the engine.

    `sequences` and `answers` belong to the engine's thread once the request was sent there, everything else to the loop.
    """

    def __init__(self, sequences: list[Sequence], *, streams: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.sequences = sequences
        self.streams = streams
        self.answers: list[Output] = []
        self.cancelled = False
        self.begun = False
        """Whether a piece of it has been handed over. The thread's."""
        self._pieces: list[Chunk | Completion] = []
        self._error: MLXInferError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Chunk | Completion]:
        """What has come since the last time, at least one. Raises what ended the request early."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, piece: Piece) -> None:
        if isinstance(piece, MLXInferError):
            self._error = piece
        else:
            self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox:
    """Pieces for many requests, handed over together: waking a loop costs as much as all they hold."""

    def __init__(self) -> None:
        self._pieces: dict[asyncio.AbstractEventLoop, list[tuple[Request, Piece]]] = {}
        self._sent_at = 0.0
        self._urgent = False

    def put(self, request: Request, piece: Piece) -> None:
        self._pieces.setdefault(request.loop, []).append((request, piece))
        if not request.begun or not isinstance(piece, Chunk) or piece.finish_reason:
            request.begun = self._urgent = True

    def due(self, now: float) -> bool:
        """Whether it is time to `send`: a request's first piece and its last wait for nothing."""
        return self._urgent or (bool(self._pieces) and now - self._sent_at >= _EVERY_S)

    def send(self) -> list[Request]:
        """Hand all of it over; returns the requests whose loop is gone."""
        lost: list[Request] = []
        for loop, pieces in self._pieces.items():
            try:
                loop.call_soon_threadsafe(_deliver, pieces)
            except RuntimeError:  # closed
                lost += (request for request, _ in pieces)
        self._pieces.clear()
        self._sent_at, self._urgent = perf_counter(), False
        return lost


def _deliver(pieces: Iterable[tuple[Request, Piece]]) -> None:
    for request, piece in pieces:
        request.take(piece)


def stopped(reason: str) -> EngineError:
    return EngineError(f"the engine stopped before the answer was finished: {reason}")


Command = Callable[[], None]
Progress = Callable[[int, int], None]

_RESTARTS = 1
_STATS_EVERY_S = 0.05
_EXIT_PATIENCE_S = 10.0
"""The interpreter waits so long at its end for the step that is running."""

_CLOSED = "this AsyncLLM is closed: create a new one"

_log = logging.getLogger(__name__)


class _Closed(BaseException):
    """Loading is given up. No `Exception`, so that nobody on the way takes it for a fault of the checkpoint."""


class EngineThread:
    """`send` and `close` may be called from any thread; everything that begins with an underscore runs in the thread itself.

    A fault (anything but a user's error) ends all requests with `EngineError`, and the engine begins anew, once; after a second one it
    stays down. The thread waits for commands when there is nothing to compute, and takes them between two steps otherwise.
    """

    def __init__(self, open_model: Callable[[Progress], OpenModel], progress: Progress | None) -> None:
        self.opened: Future[OpenModel] = Future()
        self.opened.set_running_or_notify_cancel()  # now nobody who waits for it can cancel it
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()
        self.stats = EngineStats()
        self._open_model = open_model
        self._progress = progress
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._outbox = Outbox()
        self._desk: OutputProcessor | None = None
        self._requests: dict[Sequence, Request] = {}
        """Of every sequence that has not ended."""
        self._gate = Lock()
        """Between a request that comes and the end, after which none may come."""
        self._over = ""
        self._closing = False
        self._down = ""
        self._restarts = 0
        self._before = EngineStats()
        self._stats_at = 0.0
        self._thread = Thread(target=self._run, name="mlxinfer engine", daemon=True)
        # A daemon, because the interpreter joins other threads before it calls `atexit`'s functions, which are what stops this one.
        atexit.register(self.stop_at_exit)
        self._thread.start()

    def send(self, request: Request) -> None:
        """Have it run. Its pieces come through its loop. Raises `EngineError` where nothing runs any more."""
        with self._gate:
            if self._over:
                raise EngineError(self._over)
            self._commands.put(partial(self._submit, request))

    def cancel(self, request: Request) -> None:
        """End it between two steps. Harmless if it has ended."""
        if not request.cancelled:
            request.cancelled = True
            self._commands.put(partial(self._cancel, request))

    def close(self) -> None:
        """End everything after the step that is running; `ended` tells when."""
        self._closing = True
        self._commands.put(lambda: None)

    def stop_at_exit(self) -> None:
        self.close()
        self._thread.join(_EXIT_PATIENCE_S)

    def _run(self) -> None:
        try:
            opened = self._open()
            if opened is not None:
                self._serve(opened)
        finally:
            if self._desk is not None:
                self._desk.engine.close()
            opened = self._desk = None
            self._end()

    def _end(self) -> None:
        if self._closing:
            self._down = _CLOSED
        with self._gate:
            self._over = self._down or "the engine is down"
        self._fail_all(self._over)
        self._take_commands()
        if self.opened.exception() is None:  # let go of the model
            self.opened = Future()
            self.opened.set_exception(EngineError(self._over))
        mx.clear_cache()
        atexit.unregister(self.stop_at_exit)
        self.ended.set_result(None)

    def _open(self) -> OpenModel | None:
        try:
            opened = self._open_model(self._tell)
        except MLXInferError as error:
            self._down = str(error)
            self.opened.set_exception(error)
        except BaseException as error:
            self._down = _CLOSED if isinstance(error, _Closed) else f"the model could not be loaded: {_one_line(error)}"
            self.opened.set_exception(EngineError(self._down))
            if not isinstance(error, _Closed):
                raise
        else:
            self.opened.set_result(opened)
            return opened
        return None

    def _tell(self, done: int, total: int) -> None:
        if self._closing:
            raise _Closed
        if self._progress:
            self._progress(done, total)

    def _serve(self, opened: OpenModel) -> None:
        while not self._closing:
            try:
                self._desk = OutputProcessor(opened.engine(), opened.loaded.tokenizer)
                self._loop(self._desk)
            except Exception as error:
                self._fail_all(_one_line(error))
                self._before, self._restarts = self.stats, self._restarts + 1
                if self._restarts > _RESTARTS:
                    self._down = f"the engine is down, as it failed again after a restart: {_one_line(error)}"
                    self.stats = replace(self.stats, running=0, waiting=0)
                    raise
                _log.exception("the engine failed and starts again")
                if self._desk is not None:
                    self._desk.engine.close(timeout_s=0)
                self._desk = None
                mx.clear_cache()

    def _loop(self, desk: OutputProcessor) -> None:
        self._publish(desk)
        while not self._closing:
            if desk.engine.idle:
                self._publish(desk)
                while self._commands.empty() and desk.engine.tidy():
                    pass  # each call copies something for the disk
                self._commands.get()()
            self._take_commands()
            if not desk.engine.idle:
                self._step(desk)

    def _take_commands(self) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()

    def _step(self, desk: OutputProcessor) -> None:
        ended = False
        for answer, chunk in desk.step():
            request = self._requests.get(answer.sequence)
            if request is None:
                continue
            if request.streams:
                self._outbox.put(request, chunk)
            if chunk.finish_reason:
                del self._requests[answer.sequence]
                ended = True
                if not request.streams:
                    self._outbox.put(request, answer.completion())
        now = perf_counter()
        if ended or now - self._stats_at > _STATS_EVERY_S:
            self._publish(desk)
        if desk.engine.reads_prompt or self._outbox.due(now):
            self._send()

    def _send(self) -> None:
        for request in self._outbox.send():
            self._cancel(request)

    def _submit(self, request: Request) -> None:
        if request.cancelled:
            return
        self._requests.update((s, request) for s in request.sequences)
        if self._over or self._desk is None:
            self._fail_all(self._over or "it starts again")
            return
        try:
            request.answers = self._desk.submit(request.sequences)
        except MLXInferError as error:
            self._forget(request)
            self._outbox.put(request, error)
            self._send()

    def _cancel(self, request: Request) -> None:
        self._forget(request)
        if self._desk is not None:
            self._desk.cancel(request.answers)

    def _forget(self, request: Request) -> None:
        for sequence in request.sequences:
            self._requests.pop(sequence, None)

    def _fail_all(self, reason: str) -> None:
        for request in dict.fromkeys(self._requests.values()):
            self._outbox.put(request, stopped(reason))
        self._requests.clear()
        self._outbox.send()

    def _publish(self, desk: OutputProcessor) -> None:
        self._stats_at = perf_counter()
        self.stats = replace(self._before + desk.engine.stats(), restarts=self._restarts)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
