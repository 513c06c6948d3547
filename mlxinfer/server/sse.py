"""Streamed responses: server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) and JSON lines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from .errors import APIError, server_failed, stopping
from .settings import Limits

T = TypeVar("T")

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON_LINES = "application/x-ndjson"
COMMENT = b": keep-alive\n\n"
"""An event that clients ignore."""
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """An event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


def line(value: Any) -> bytes:
    """One line of JSON."""
    return to_json(value) + b"\n"


class Template:
    """Unnamed events that differ only in the field `name`. The fields `before` and `after` it are encoded once."""

    def __init__(self, before: Mapping[str, Any], name: str, after: Mapping[str, Any]) -> None:
        head, tail = (to_json(part)[1:-1] for part in (before, after))
        self._head = b"data: {" + head + b"," + to_json(name) + b":"
        self._tail = (b"," + tail if tail else b"") + b"}\n\n"

    def data(self, value: Any) -> bytes:
        """The event with this value in the field."""
        return self._head + to_json(value) + self._tail


class ClientGone(Exception):
    """The client closed the connection, or stopped reading, before the response was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client closes the connection first, cancel `work` and raise `ClientGone`."""
    task = asyncio.ensure_future(work)
    await _first_of(task, [asyncio.ensure_future(_client_gone(receive))])
    return task.result()


async def _client_gone(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: asyncio.Future[Any], others: Sequence[asyncio.Future[None]]) -> None:
    """Wait for `work`, or raise `ClientGone` if one of `others` ends first. Cancels all tasks that are still running."""
    tasks = [work, *others]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nothing() -> bytes:
    return b""


class Stream:
    """An ASGI response that is sent while its pieces are made.

    The status is sent with the first piece, or after `Limits.patience_s`. An `APIError` before that time is raised, and the response
    gets the error's own status. A later error is sent as `failed(error)`, the last piece.

    `begin` is sent with the status, and `end()` after the last of `pieces`. An empty piece sends only the status. `keep_alive` is
    sent after each `Limits.keep_alive_s` without output. `pieces` is closed if the client closes the connection, or does not read for
    `Limits.write_s`.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        failed: Callable[[APIError], bytes],
        limits: Limits,
        begin: bytes = b"",
        end: Callable[[], bytes] = _nothing,
        media_type: str = EVENT_STREAM,
        keep_alive: bytes = COMMENT,
    ) -> None:
        self._pieces = pieces
        self._failed = failed
        self._limits = limits
        self._begin = begin
        self._end = end
        self._media_type = media_type
        self._keep_alive = keep_alive
        self._started = False
        self._refused = False
        self._written = 0
        self._writing_since = 0.0
        self._send: Callable[[Any], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        pump = asyncio.ensure_future(self._pump())
        others = [asyncio.ensure_future(_client_gone(receive)), asyncio.ensure_future(self._keep_awake())]
        try:
            await _first_of(pump, others)
        except ClientGone:
            # A graceful close would wait until the client has read everything.
            scope.get("state", {}).get("abort", lambda: None)()
            raise
        except asyncio.CancelledError:  # the server stops
            if not self._started:
                raise
            await self._write(self._failed(stopping()))
            await self._send_body(b"", more=False)
            return
        pump.result()

    async def _pump(self) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    await self._write(piece)
            await self._write(self._end())
        except APIError as error:
            if not self._started:
                self._refused = True
                raise
            await self._write(self._failed(error))
        except Exception:
            if self._started:
                await self._write(self._failed(server_failed()))
            self._refused = True
            raise
        await self._send_body(b"", more=False)

    async def _write(self, piece: bytes = b"") -> None:
        """Send a piece; the first piece follows the status."""
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            piece = self._begin + piece
        if piece:
            await self._send_body(piece)

    async def _send_body(self, piece: bytes, more: bool = True) -> None:
        self._writing_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self._writing_since = 0.0
        self._written += 1

    async def _keep_awake(self) -> None:
        """Send the status and keep-alives in time. Returns if the client has not read for too long."""
        await asyncio.sleep(self._limits.patience_s)
        if not self._refused:  # an error at this very moment has its own status
            await self._write()
        while True:
            seen = self._written
            await asyncio.sleep(self._limits.keep_alive_s)
            if self._writing_since:
                if time.monotonic() - self._writing_since > self._limits.write_s:
                    return
            elif self._written == seen:
                await self._write(self._keep_alive)
