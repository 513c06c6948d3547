"""Delivers pieces of answers from the engine's thread to readers in event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from typing import Union

import mlx.core as mx
import numpy as np

from ...errors import MLXInferError
from ...types import Chunk, Completion
from ..core.sequence import Sequence
from ..text.output_processor import Output

Piece = Union[Chunk, Completion, mx.array, np.ndarray]
"""A chunk, a whole answer, logits, or a vector."""

_EVERY_S = 1 / 30
"""Least seconds between two deliveries for running answers: faster than people read. Waking an event loop for each token of a small model
would take 5 % of its speed on two cores."""


class Request:
    """A request as its reader sees it. Unread pieces are kept here, at most `max_tokens`, so that a slow reader never delays the engine.

    `sequences` and `answers` belong to the engine's thread once the request was sent, everything else to the event loop.
    """

    def __init__(self, sequences: list[Sequence], *, streams: bool, wants_logits: bool = False) -> None:
        """`streams`: deliver chunks instead of whole completions. `wants_logits`: deliver the evaluated logits of the prompt."""
        self.loop = asyncio.get_running_loop()
        self.sequences = sequences
        self.streams = streams
        self.wants_logits = wants_logits
        self.answers: list[Output] = []
        self.cancelled = False
        self.begun = False
        """True once a piece was delivered. Belongs to the engine's thread."""
        self._pieces: list[Piece] = []
        self._error: MLXInferError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Piece]:
        """New pieces, at least one. Raises the error that ended the request early."""
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

    def take(self, piece: Piece | MLXInferError) -> None:
        """Add a piece or an error; called in the event loop."""
        if isinstance(piece, MLXInferError):
            self._error = piece
        else:
            self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox:
    """Collects pieces of many requests for one delivery, because waking an event loop is expensive."""

    def __init__(self) -> None:
        self._pieces: dict[asyncio.AbstractEventLoop, list[tuple[Request, Piece | MLXInferError]]] = {}
        self._sent_at = 0.0
        self._urgent = False

    def put(self, request: Request, piece: Piece | MLXInferError) -> None:
        self._pieces.setdefault(request.loop, []).append((request, piece))
        if not request.begun or not isinstance(piece, Chunk) or piece.finish_reason:
            request.begun = self._urgent = True

    def due(self, now: float) -> bool:
        """True if it is time to `send`. The first and the last piece of a request are always due."""
        return self._urgent or (bool(self._pieces) and now - self._sent_at >= _EVERY_S)

    def send(self) -> list[Request]:
        """Deliver all pieces; returns the requests whose loop is closed."""
        lost: list[Request] = []
        for loop, pieces in self._pieces.items():
            try:
                loop.call_soon_threadsafe(_deliver, pieces)
            except RuntimeError:  # closed
                lost += (request for request, _ in pieces)
        self._pieces.clear()
        self._sent_at, self._urgent = perf_counter(), False
        return lost


def _deliver(pieces: Iterable[tuple[Request, Piece | MLXInferError]]) -> None:
    for request, piece in pieces:
        request.take(piece)
