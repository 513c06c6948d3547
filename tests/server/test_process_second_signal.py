"""Answers of clients when a second signal stops the server."""

from __future__ import annotations

import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM

SAID = "The request was stopped: the server is shutting down."
MESSAGES = [{"role": "user", "content": "Hello"}]
LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4000},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4000},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4000},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4000},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 4000}},
}


def begun(live: LiveServer, path: str, stream: bool) -> socket.socket:
    connection = live.connect(unix=True)
    body = json.dumps({"model": "tiny", "stream": stream, **LONG[path]}).encode()
    connection.sendall(request(path, body, "Content-Type: application/json"))
    return connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body, to the end; raises if a chunked body is cut off."""
    with connection:
        response = HTTPResponse(connection)
        response.begin()
        return response.status, response.read()


def message_of(path: str, value: dict[str, Any]) -> str:
    """The message of an error in the dialect's shape."""
    if path.startswith("/api/"):
        return value["error"]
    if path == "/v1/messages":
        assert (value["type"], set(value["error"])) == ("error", {"type", "message"})
        return value["error"]["message"]
    if value.get("type") == "error":  # an event of a response
        return value["message"]
    assert value["error"]["code"] == "engine_stopped"
    return value["error"]["message"]


def test_streams_end_with_an_error_and_answers_are_refused(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = [(path, stream) for path in LONG for stream in (True, False)]
    with caplog.at_level(logging.WARNING), live_server({"tiny": lambda: AsyncLLM(tiny_path)}) as live:
        connections = [begun(live, path, stream) for path, stream in asked]
        live.until(lambda stats: stats.running == len(asked))
        for (_, stream), connection in zip(asked, connections, strict=True):
            if stream:  # the answer must have started
                assert connection.recv(1, socket.MSG_PEEK)
        live.server.end()
        live.server.end()
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(answer, connections))
    for (path, stream), (status, body) in zip(asked, answers, strict=True):
        last = body.decode().strip().splitlines()[-1].removeprefix("data: ")
        assert (path, status) == (path, 200 if stream else 529 if path == "/v1/messages" else 503)
        assert message_of(path, json.loads(last)) == SAID
        assert b"[DONE]" not in body
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.long
def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tiny_path: Path) -> None:
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}) as live:
        connection = live.connect(unix=True)
        body = {"model": "tiny", "stream": True, "n": 16, "messages": MESSAGES, "max_tokens": 300}
        connection.sendall(request("/v1/chat/completions", json.dumps(body).encode(), "Content-Type: application/json"))
        live.until(lambda stats: stats.running == 16)
        live.until(lambda stats: stats.running == 0)  # more than a megabyte waits for the client
        began = time.monotonic()
        live.server.end()
        live.server.end()
    assert time.monotonic() - began < 30  # well before `Limits.write_s`
    connection.close()
