"""A request on its way between a program's event loop and the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from typing import Union

from ..errors import EngineError, MLXInferError
from ..types import Chunk, Completion
from .answer import Answer
from .sequence import Sequence

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
        self.answers: list[Answer] = []
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
