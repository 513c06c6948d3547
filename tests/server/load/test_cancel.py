"""A disconnecting client cancels its request in every state."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
from support.http.live_server import LiveServer

from mlxinfer.server import log

if TYPE_CHECKING:
    from openai import OpenAI

LONG = 3000


def request(path: str, **body: Any) -> bytes:
    raw = json.dumps({"model": "tiny", "max_tokens": LONG, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def test_closing_a_stream_stops_the_engine(client: OpenAI, live: LiveServer) -> None:
    before = live.stats().completion_tokens
    with client.completions.create(model="tiny", prompt="Hello", max_tokens=LONG, stream=True) as stream:
        for _ in range(3):
            next(stream)
    stats = live.until(lambda s: s.running == s.waiting == 0)
    assert stats.pages_used == 0
    assert stats.completion_tokens - before < LONG


@pytest.mark.parametrize("unix", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [{"prompt": "Hello"}, {"prompt": ["One", "Two"], "n": 3}, {"prompt": "x" * 900}], ids=str)
def test_a_connection_that_breaks_off(live: LiveServer, unix: bool, stream: bool, body: dict[str, Any]) -> None:
    before = live.stats().completion_tokens
    connection = live.connect(unix=unix)
    connection.sendall(request("/v1/completions", stream=stream, **body))
    live.until(lambda s: s.running > 0)
    connection.close()
    stats = live.until(lambda s: s.running == s.waiting == 0)
    assert stats.pages_used == 0
    assert stats.completion_tokens - before < LONG


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_says_how_long_the_prompt_was(live: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(log, "access", lines.append)
    connection = live.connect(unix=True)
    connection.sendall(request("/v1/completions", prompt=[[5] * 40, [6] * 30], stream=stream))
    live.until(lambda s: s.running > 0)
    connection.close()
    live.until(lambda s: s.running == s.waiting == 0 and bool(lines))
    assert [(line["status"], line["prompt_tokens"]) for line in lines] == [(499, 70)]


def test_requests_that_wait_are_cancelled_too(live: LiveServer) -> None:
    connections = [live.connect(unix=True) for _ in range(24)]
    for connection in connections:
        connection.sendall(request("/v1/completions", prompt="Hello", stream=True))
    live.until(lambda s: s.running + s.waiting == 24)
    for connection in reversed(connections):
        connection.close()
    assert live.until(lambda s: s.running == s.waiting == 0).pages_used == 0


def test_scoring_is_cancelled(live: LiveServer) -> None:
    connection = live.connect(unix=True)
    connection.sendall(request("/v1/completions", prompt="x" * 3500, echo=True, logprobs=1, stream=True))
    live.until(lambda s: s.running > 0)
    connection.close()
    assert live.until(lambda s: s.running == s.waiting == 0).pages_used == 0


def test_the_server_answers_on(live: LiveServer, client: OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="Hello", max_tokens=3).usage


@pytest.mark.long
def test_a_client_that_stops_reading_holds_nobody_up(live: LiveServer, client: OpenAI) -> None:
    deaf = live.connect(unix=True)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.sendall(request("/v1/completions", prompt="Hello", max_tokens=800, stream=True, logprobs=20))
    live.until(lambda s: s.running > 0)
    assert client.completions.create(model="tiny", prompt="Hello", max_tokens=3).usage
    live.until(lambda s: s.running == 0, seconds=60)
    deaf.close()
