"""Responses for Anthropic's and Ollama's clients, compared byte by byte where nothing depends on time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.settings import Limits

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
LONG = 3000


def request(path: str, **body: Any) -> bytes:
    raw = json.dumps({"model": "tiny", "messages": MESSAGES, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def messages(**body: Any) -> bytes:
    return request("/v1/messages", **{"max_tokens": 3, "seed": 1, "temperature": 0, **body})


def chat(**options: Any) -> bytes:
    return request("/api/chat", options={"num_predict": 3, "temperature": 0, **options})


TRANSCRIPT = """event: message_start
data: {"type":"message_start","message":{"id":"ID","type":"message","role":"assistant","model":"tiny","content":[],\
"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":23,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,\
"output_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

DELTAS
event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},"usage":{"input_tokens":23,\
"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":3}}

event: message_stop
data: {"type":"message_stop"}

"""
DELTA = 'event: content_block_delta\ndata: {{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":{}}}}}\n'


def test_anthropics_events(live: LiveServer) -> None:
    text = json.loads(live.exchange(messages())[2])["content"][0]["text"]
    status, headers, body = live.exchange(messages(stream=True))
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    deltas = "\n".join(DELTA.format(json.dumps(letter)) for letter in text)
    assert re.sub("msg_[0-9a-f]{32}", "ID", body.decode()) == TRANSCRIPT.replace("DELTAS", deltas)


@pytest.mark.smoke
def test_anthropics_message(live: LiveServer) -> None:
    status, headers, body = live.exchange(messages())
    assert (status, headers["content-type"]) == (200, "application/json")
    message = json.loads(body)
    text = message["content"][0]["text"]
    usage = {"input_tokens": 23, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 3}
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": usage,
    }


@pytest.mark.smoke
def test_ollamas_lines(live: LiveServer) -> None:
    status, headers, body = live.exchange(chat())
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    assert body.endswith(b"\n")
    lines = [json.loads(line) for line in body.decode().splitlines()]
    created = [line.pop("created_at") for line in lines]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", when) for when in created)
    *parts, last = lines
    assert [set(part) for part in parts] == [{"model", "message", "done"}] * 3
    durations = {name: last.pop(name) for name in ("total_duration", "prompt_eval_duration", "eval_duration")}
    assert all(type(value) is int and value > 0 for value in durations.values())
    assert last == {
        "model": "tiny",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "length",
        "load_duration": 0,
        "prompt_eval_count": 23,
        "eval_count": 3,
    }


@pytest.fixture
def one_at_a_time(tiny_path: Path) -> Iterator[LiveServer]:
    """A server with one place: a second request waits, and its client soon gets a keep-alive."""
    limits = Limits(patience_s=0.02, keep_alive_s=0.02)
    with live_server({"tiny": lambda: AsyncLLM(tiny_path, max_sequences=1)}, limits=limits) as server:
        yield server


def answered_late(live: LiveServer, raw: bytes, until: bytes) -> bytes:
    """The answer to a request that waits until these bytes have arrived."""
    with live.connect(unix=True) as first, live.connect(unix=True) as second:
        first.sendall(messages(max_tokens=LONG, stream=True))
        live.until(lambda s: s.running == 1)
        second.sendall(raw)
        response = HTTPResponse(second)
        response.begin()
        seen = b""
        while until not in seen:
            seen += response.readline()
        first.close()
        return seen + response.read()


def test_pings_while_anthropics_client_waits(one_at_a_time: LiveServer) -> None:
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    body = answered_late(one_at_a_time, messages(stream=True), b"event: ping")
    names = re.findall(r"^event: (\w+)$", body.decode(), re.MULTILINE)
    assert names[:2] == ["message_start", "ping"]  # the kind of the first block is not known yet
    assert names.count("content_block_start") == 1
    assert [name for name in names if name != "ping"][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert ping in body


def test_empty_lines_of_ollamas_while_its_client_waits(one_at_a_time: LiveServer) -> None:
    body = answered_late(one_at_a_time, chat(), b"\n")
    lines = [json.loads(line) for line in body.decode().splitlines()]
    assert (lines[0]["message"], lines[0]["done"]) == ({"role": "assistant", "content": ""}, False)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len("".join(line["message"]["content"] for line in lines)) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_ends(tiny_path: Path, stream: bool) -> None:
    """During a stream the error is an event or a line; before the stream it is a status."""
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}) as live:
        asked = [messages(max_tokens=LONG, stream=stream), request("/api/chat", stream=stream)]
        connections = [live.connect(unix=True) for _ in asked]
        for connection, raw in zip(connections, asked, strict=True):
            connection.sendall(raw)
        before = live.stats().steps
        live.until(lambda s: s.running == 2 and s.steps > before + 20)
        asyncio.run(live.models["tiny"].close())
        responses = [HTTPResponse(connection) for connection in connections]
        for response in responses:
            response.begin()
        claude, llama = (response.read().decode() for response in responses)
        assert [response.status for response in responses] == ([200, 200] if stream else [529, 503])
        for connection in connections:
            connection.close()
    if stream:
        claude, llama = claude.removesuffix("\n\n").rpartition("event: error\ndata: ")[2], llama.splitlines()[-1]
    assert json.loads(claude)["type"] == "error"
    assert json.loads(claude)["error"]["type"] == "overloaded_error"
    assert set(json.loads(llama)) == {"error"}
