"""A request on its way between a program's event loop and the engine's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Union

from ..errors import EngineError, MLXInferError
from ..types import Chunk, Completion
from .answer import Answer
from .sequence import Sequence

Piece = Union[Chunk, Completion, MLXInferError]


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
        self._pieces: deque[Piece] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk | Completion:
        """Raises what ended the request early."""
        while not self._pieces:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        piece = self._pieces.popleft()
        if isinstance(piece, MLXInferError):
            raise piece
        return piece

    def take(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox:
    """Pieces for many requests, handed over once per step and loop: waking a loop costs as much as all they hold."""

    def __init__(self) -> None:
        self._pieces: dict[asyncio.AbstractEventLoop, list[tuple[Request, Piece]]] = {}

    def put(self, request: Request, piece: Piece) -> None:
        self._pieces.setdefault(request.loop, []).append((request, piece))

    def send(self) -> list[Request]:
        """Hand all of it over; returns the requests whose loop is gone."""
        lost: list[Request] = []
        for loop, pieces in self._pieces.items():
            try:
                loop.call_soon_threadsafe(_deliver, pieces)
            except RuntimeError:  # closed
                lost += (request for request, _ in pieces)
        self._pieces.clear()
        return lost


def _deliver(pieces: Iterable[tuple[Request, Piece]]) -> None:
    for request, piece in pieces:
        request.take(piece)


def stopped(reason: str) -> EngineError:
    return EngineError(f"the engine stopped before the answer was finished: {reason}")
