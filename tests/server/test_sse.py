"""Bytes of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mlxinfer.server import sse
from mlxinfer.server.errors import APIError, invalid
from mlxinfer.server.settings import Limits

CHOICES = [{"index": 0, "delta": {"content": 'é "\n</script>'}, "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize("after", [{}, {"usage": None}, {"a": [1.5], "b": "x"}], ids=str)
def test_a_template_gives_what_the_whole_would(after: dict[str, Any]) -> None:
    before = {"id": "chatcmpl-1", "created": 5, "model": 'ä"'}
    assert sse.Template(before, "choices", after).data(CHOICES) == sse.data({**before, "choices": CHOICES, **after})


def test_an_event_is_one_line_of_json() -> None:
    for found in (sse.data(CHOICES), sse.event("x", CHOICES).removeprefix(b"event: x\n")):
        (line,) = found.removesuffix(b"\n\n").split(b"\n")
        assert json.loads(line.removeprefix(b"data: ")) == CHOICES


def test_an_error_at_the_moment_when_patience_ends_has_its_own_status() -> None:
    sent: list[Any] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0)
        raise invalid("no")
        yield b""

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    stream = sse.Stream(pieces(), failed=lambda error: b"", limits=Limits(patience_s=0.0))
    with pytest.raises(APIError):
        asyncio.run(stream({"type": "http", "state": {}}, receive, send))
    assert sent == []
