"""Answers that come in pieces: event streams and lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from .errors import APIError
from .settings import Limits

T = TypeVar("T")

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON_LINES = "application/x-ndjson"
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def data(value: Any) -> bytes:
    """One event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


def line(value: Any) -> bytes:
    return to_json(value) + b"\n"


class Template:
    """Events that differ in one field only: what is around it is encoded once."""

    def __init__(self, before: Mapping[str, Any], name: str, after: Mapping[str, Any]) -> None:
        head, tail = (to_json(part)[1:-1] for part in (before, after))
        self._head = b"data: {" + head + b"," + to_json(name) + b":"
        self._tail = (b"," + tail if tail else b"") + b"}\n\n"

    def data(self, value: Any) -> bytes:
        return self._head + to_json(value) + self._tail


async def client_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled, and `ClientGone` raised, if the client goes first."""
    task = asyncio.ensure_future(work)
    await _first_of(task, [asyncio.ensure_future(client_gone(receive))])
    return task.result()


async def _first_of(work: asyncio.Future[Any], others: Sequence[asyncio.Future[None]]) -> None:
    """Wait for `work`; if one of the others ends first, raise `ClientGone`. Nothing is left running."""
    tasks = [work, *others]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Stream:
    """An ASGI response whose pieces are made while it is sent.

    The status is held back for a moment (`Limits.patience_s`), so that a `APIError` before the first piece is raised and can have a status
    of its own; after that it becomes the piece that `failed` makes of it. While there is nothing to send, `keep_alive` is sent instead.
    A client that closes the connection, or stops reading, closes `pieces`. An empty piece says that there will be others.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        failed: Callable[[APIError], bytes],
        limits: Limits,
        media_type: str = EVENT_STREAM,
        keep_alive: bytes = COMMENT,
    ) -> None:
        self._pieces = pieces
        self._failed = failed
        self._limits = limits
        self._media_type = media_type
        self._keep_alive = keep_alive
        self._started = False
        self._written = 0
        self._writing_since = 0.0
        self._send: Callable[[Any], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        pump = asyncio.ensure_future(self._pump())
        others = [asyncio.ensure_future(client_gone(receive)), asyncio.ensure_future(self._keep_awake())]
        try:
            await _first_of(pump, others)
        except ClientGone:
            # Closing politely would wait for what the client does not read.
            scope.get("state", {}).get("abort", lambda: None)()
            raise
        pump.result()

    async def _pump(self) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if not self._started:
                        await self._start()
                    if piece:
                        await self._write(piece)
        except APIError as problem:
            if not self._started:
                raise
            await self._write(self._failed(problem))
        except Exception:
            if self._started:
                await self._write(self._failed(APIError(500, "internal", "The server failed.", code="internal_error")))
            raise
        await self._start()
        await self._write(b"", more=False)

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, piece: bytes, more: bool = True) -> None:
        self._writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self._writing_since = 0.0
        self._written += 1

    async def _keep_awake(self) -> None:
        """Returns when the client has not read for too long."""
        await asyncio.sleep(self._limits.patience_s)
        await self._start()
        while True:
            seen = self._written
            await asyncio.sleep(self._limits.keep_alive_s)
            if self._writing_since:
                if time.monotonic() - self._writing_since > self._limits.write_s:
                    return
            elif self._written == seen:
                await self._write(self._keep_alive)
