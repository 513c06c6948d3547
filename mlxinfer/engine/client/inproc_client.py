"""Runs an engine in the threads of its callers. Each step is computed by the thread whose turn it is, and serves the requests of all.

`LLM` as a synchronous face of `EngineThread` would save 60 to 90 lines, and was measured: 0.98 to 1.01 times the speed of `generate` and
`stream`, a start 2.5 % faster, and Ctrl-C after 0.1 ms instead of up to 48 ms. But callers that spend 0.5 ms of Python per token would lose
1 to 9 %, and streams that are read half-way would be computed ahead.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from threading import Lock, get_ident

import mlx.core as mx
import numpy as np

from ...errors import EngineError, MLXInferError, QueueFullError
from ...types import Chunk, Completion
from ...util.device import clear_cache
from ..core.sequence import Sequence
from ..model_base import FORKED
from ..open_model import OpenModel
from ..text.output_processor import FEED, Output, OutputProcessor, check_unbroken, fault_line, stopped
from ..text.pooled_output import PooledOutput

_CLOSED = "this LLM is closed: create a new one"


class FairLock:
    """A lock that is granted in order of arrival, so that a thread that computes step after step yields to others.

    The owner is known: after an interrupt its thread calls `release_if_mine`.
    """

    def __init__(self) -> None:
        self._gate = Lock()
        """Guards the fields below; held briefly."""
        self._owner: int | None = None
        self._waiting: deque[tuple[int, Lock]] = deque()

    def __enter__(self) -> None:
        me, turn = get_ident(), Lock()
        with self._gate:
            if self._owner is None or self._owner == me:
                self._owner = me
                return
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # released by the owner before us
        except BaseException:
            with self._gate:
                if (me, turn) in self._waiting:
                    self._waiting.remove((me, turn))
            self.release_if_mine()
            raise

    def __exit__(self, *_: object) -> None:
        self.release_if_mine()

    def try_acquire(self) -> bool:
        """Take the lock if it is free, without waiting. May be called at any moment, by a finalizer too."""
        if not self._gate.acquire(blocking=False):
            return False
        try:
            if self._owner is None:
                self._owner = get_ident()
                return True
            return False
        finally:
            self._gate.release()

    def release_if_mine(self) -> None:
        """Pass the lock to the thread that has waited longest."""
        with self._gate:
            if self._owner != get_ident():
                return
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                turn.release()
            else:
                self._owner = None


_idle_streams: list[mx.Stream] = []
"""Streams of closed models, to reuse: MLX never frees a stream."""


def _take_stream() -> mx.Stream:
    """A stream that any thread may use, one at a time. MLX's other streams belong to the threads that made them."""
    device = mx.default_device()
    with suppress(IndexError):
        stream = _idle_streams.pop()
        if stream.device == device:
            return stream
        _idle_streams.append(stream)
    return mx.new_thread_unsafe_stream(device)


class InprocClient:
    """Any number of threads may call it at once. A fault in one thread's step, Ctrl-C included, ends the requests of the others with
    `EngineError`; the engine can be used afterwards."""

    def __init__(self, open_model: Callable[[], OpenModel]) -> None:
        """Raises what `open_model` raises."""
        self._process = os.getpid()
        self._lock = FairLock()
        self._stream = _take_stream()
        self._give_stream_back = weakref.finalize(self, _idle_streams.append, self._stream)
        self._give_stream_back.atexit = False
        self._chunks: dict[Sequence, deque[Chunk]] = {}
        """Chunks of streamed answers that were not read yet, by sequence."""
        self._dropped: deque[Output] = deque()
        """Answers to cancel at the next turn."""
        self._fault = ""
        self._outputs: OutputProcessor | None = None
        with mx.stream(self._stream):
            self._opened: OpenModel | None = open_model()
            self._outputs = OutputProcessor(self._opened.engine(), self._opened.loaded.tokenizer)

    @property
    def opened(self) -> OpenModel:
        """Raises `MLXInferError` once it is closed."""
        if self._opened is None:
            raise MLXInferError(_CLOSED)
        return self._opened

    @property
    def outputs(self) -> OutputProcessor:
        """Raises `MLXInferError` once it is closed."""
        if self._outputs is None:
            raise MLXInferError(_CLOSED)
        return self._outputs

    @property
    def ended(self) -> bool:
        return self._outputs is None

    @contextmanager
    def turn(self) -> Iterator[OutputProcessor]:
        """The engine with its answers, for this thread alone. Raises `EngineError` in a forked child, `MLXInferError` once it is closed."""
        if os.getpid() != self._process:
            raise EngineError(FORKED)
        with self._lock, mx.stream(self._stream):
            outputs = self.outputs
            self._cancel_dropped(outputs)
            yield outputs

    def change_adapters(self, change: Callable[[], None]) -> None:
        """Load or unload adapters of the model between two steps. Raises what `change` raises."""
        with self.turn() as outputs:
            change()
            outputs.engine.adapt(self.opened.adapters.adapted)

    def complete(self, requests: deque[list[Sequence]], show: Callable[[int], None] | None = None) -> list[Completion]:
        """Answers to these requests, which are submitted while there is room. `show` is called after each step with the number of complete
        answers."""
        return [answer.completion() for answer in self._run(requests, show)]

    def pooled(self, sequences: Many[Sequence]) -> list[np.ndarray | None]:
        """Vectors of pooled sequences; None for one that ran out of time."""
        return [answer.vector for answer in self._run(deque([s] for s in sequences)) if isinstance(answer, PooledOutput)]

    def _run(self, requests: deque[list[Sequence]], show: Callable[[int], None] | None = None) -> list[Output]:
        answers: list[Output] = []
        try:
            while requests or answers:
                with self.turn() as outputs:
                    self._feed(outputs, requests, answers)
                    if not requests and not any(answer.sequence in outputs.answers for answer in answers):
                        break
                    self._step(outputs)
                if show:
                    show(sum(answer.sequence not in outputs.answers for answer in answers))
            self._check_unbroken(answers)
            return answers
        except KeyboardInterrupt:  # may have come between taking the lock and entering its block
            self._lock.release_if_mine()
            raise
        finally:
            self._leave(answers)

    def stream(self, sequences: list[Sequence]) -> Generator[Chunk, None, None]:
        """Chunks of a request's answers. Closing the iterator cancels the request."""
        bursts = self.bursts(sequences)
        try:
            for burst in bursts:
                yield from burst
        finally:
            bursts.close()

    def bursts(self, sequences: list[Sequence]) -> Generator[list[Chunk], None, None]:
        """`stream`, with all available chunks in one list."""
        chunks: deque[Chunk] = deque()
        answers: list[Output] = []
        try:
            with self.turn() as outputs:
                answers = outputs.submit(sequences)
                self._chunks.update(dict.fromkeys(sequences, chunks))
            running = len(answers)
            while running:
                while not chunks:
                    if self._outputs is None:  # closed
                        return
                    self._next(answers, chunks)
                burst = [chunks.popleft() for _ in range(len(chunks))]
                running -= sum(chunk.finish_reason is not None for chunk in burst)
                yield burst
            check_unbroken(sequences)
        except KeyboardInterrupt:
            self._lock.release_if_mine()
            raise
        finally:
            for sequence in sequences:
                self._chunks.pop(sequence, None)
            self._leave(answers)

    def logits(self, sequence: Sequence) -> mx.array:
        """float32 `[T, vocab]` of a scored sequence, evaluated. Raises `EngineError` if it is not computed to its end."""
        with self.turn() as outputs:
            rows = outputs.rows[sequence] = []
        try:
            for _ in self.stream([sequence]):
                pass
            with self.turn():
                logits = mx.concatenate(rows)
                mx.eval(logits)
            return logits
        finally:
            outputs.rows.pop(sequence, None)

    def close(self) -> None:
        """Free the memory after the running step. Streams end; other running calls raise `MLXInferError`."""
        if self._outputs is None or os.getpid() != self._process:
            self._outputs = self._opened = None
            return
        with self._lock, mx.stream(self._stream):
            if self._outputs is not None:
                self._outputs.cancel(list(self._outputs.answers.values()))
                self._outputs.engine.close()
                if self._opened is not None:
                    self._opened.close()
                self._outputs = self._opened = None
                clear_cache()
        self._give_stream_back()

    def _feed(self, outputs: OutputProcessor, requests: deque[list[Sequence]], answers: list[Output]) -> None:
        """Submit as many requests as keep the engine busy, while the waiting list has room."""
        while requests and len(outputs.answers) < FEED * outputs.engine.config.max_num_seqs:
            try:
                answers += outputs.submit(requests[0])
            except QueueFullError:
                if outputs.engine.idle:
                    raise
                return
            requests.popleft()

    def _next(self, answers: list[Output], chunks: deque[Chunk]) -> None:
        """Compute one step, unless another thread's step has brought chunks meanwhile."""
        with self.turn() as outputs:
            if chunks:
                return
            if not any(answer.sequence in outputs.answers for answer in answers):
                raise stopped(self._fault)
            self._step(outputs)

    def _step(self, outputs: OutputProcessor) -> None:
        try:
            pieces = outputs.step()
        except BaseException as error:
            self._fault = fault_line(error)
            raise
        for answer, chunk in pieces:
            chunks = self._chunks.get(answer.sequence)
            if chunks is not None:
                chunks.append(chunk)

    def _check_unbroken(self, answers: Iterable[Output]) -> None:
        """Raise `EngineError` if a fault ended an answer."""
        check_unbroken(answer.sequence for answer in answers)
        if any(answer.finish_reason in (None, "cancelled") for answer in answers):
            raise stopped(self._fault)

    def _leave(self, answers: Many[Output]) -> None:
        """Cancel unfinished answers without waiting: a finalizer may call this in the middle of a step."""
        self._dropped.extend(answers)
        if self._lock.try_acquire():
            try:
                if self._outputs is not None and os.getpid() == self._process:
                    with mx.stream(self._stream):
                        self._cancel_dropped(self._outputs)
            finally:
                self._lock.release_if_mine()

    def _cancel_dropped(self, outputs: OutputProcessor) -> None:
        while self._dropped:
            answer = self._dropped.popleft()
            outputs.cancel([answer])
            if answer.sequence.finish_reason is None:  # an interrupt on the way into the engine lost the answer
                outputs.engine.abort(answer.sequence)
