"""Delivery of pieces to the readers of requests."""

from __future__ import annotations

import asyncio

import pytest

from mlxinfer.engine.client.async_request import Outbox, Request
from mlxinfer.errors import EngineError
from mlxinfer.types import Chunk

LATER = 3600.0


def piece(text: str, reason: str | None = None) -> Chunk:
    return Chunk(text, [1], None, reason, None, 0, None)  # type: ignore[arg-type]


async def texts(request: Request) -> list[str]:
    return [found.text for found in await request.next()]


def test_the_first_piece_and_the_last_wait_for_nothing() -> None:
    async def run() -> None:
        outbox, request, other = Outbox(), Request([], streams=True), Request([], streams=True)
        assert not outbox.due(LATER)
        outbox.put(request, piece("a"))
        assert outbox.due(0)
        outbox.send()
        outbox.put(request, piece("b"))
        outbox.put(request, piece("c"))
        assert not outbox.due(0)
        outbox.put(other, piece("A"))
        assert outbox.due(0)
        outbox.send()
        outbox.put(request, piece("d"))
        assert not outbox.due(0)
        outbox.put(request, piece("", "stop"))
        assert outbox.due(0)
        assert await texts(request) == ["a", "b", "c"]
        outbox.send()
        assert await texts(request) == ["d", ""]
        assert await texts(other) == ["A"]

    asyncio.run(run())


def test_others_wait_for_a_moment_only() -> None:
    async def run() -> None:
        outbox, request = Outbox(), Request([], streams=True)
        outbox.put(request, piece("a"))
        outbox.send()
        outbox.put(request, piece("b"))
        sent = outbox._sent_at
        assert not outbox.due(sent + 0.02)
        assert outbox.due(sent + 0.04)

    asyncio.run(run())


def test_an_error_comes_behind_what_came_before_it() -> None:
    async def run() -> None:
        outbox, request = Outbox(), Request([], streams=True)
        outbox.put(request, piece("a"))
        outbox.put(request, EngineError("it broke"))
        assert outbox.due(0)
        outbox.send()
        assert await texts(request) == ["a"]
        with pytest.raises(EngineError, match="it broke"):
            await request.next()

    asyncio.run(run())
