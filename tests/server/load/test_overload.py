"""Overload, a failing engine, and streams that are silent for a long time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.http.live_server import LiveServer, live_server, openai_client
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.core.engine import Engine
from mlxinfer.server.settings import Limits

if TYPE_CHECKING:
    from openai import OpenAI

openai = needs("openai")


def one_at_a_time(path: Path) -> AsyncLLM:
    """A server in which one request runs and one waits."""
    return AsyncLLM(path, max_num_seqs=1, max_waiting=1)


@pytest.fixture
def narrow(tiny_path: Path) -> Iterator[LiveServer]:
    limits = Limits(keep_alive_s=0.05, patience_s=0.05)
    with live_server({"tiny": lambda: one_at_a_time(tiny_path)}, limits=limits) as server:
        yield server


@pytest.fixture
def client(narrow: LiveServer) -> Iterator[OpenAI]:
    with openai_client(narrow, unix=True) as client:
        yield client


def create(client: OpenAI, **more: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "Hello", "max_tokens": 3000, **more})


def test_more_requests_than_may_wait(narrow: LiveServer, client: OpenAI) -> None:
    first = create(client, stream=True)
    next(first)
    second = create(client, stream=True)
    narrow.until(lambda s: (s.running, s.waiting) == (1, 1))
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as found:
            create(client, stream=stream)
        assert found.value.code == "rate_limit_exceeded"
        assert found.value.response.headers["retry-after"] == "1"
    first.close()
    assert next(second).choices
    second.close()
    assert narrow.until(lambda s: s.running == s.waiting == 0).pages_used == 0
    assert create(client, max_tokens=2).usage


def test_a_stream_that_waits_is_kept_awake(narrow: LiveServer, client: OpenAI) -> None:
    """The status and comments arrive before the first token, and OpenAI's client skips the comments."""
    first = create(client, stream=True)
    next(first)
    with client.completions.with_streaming_response.create(model="tiny", prompt="Hello", max_tokens=2, stream=True) as second:
        assert second.status_code == 200
        lines = second.iter_lines()
        assert next(lines) == ": keep-alive"
        first.close()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert {line.partition(" ")[0] for line in rest} <= {":", "data:"}
    busy = create(client, stream=True)
    next(busy)
    waiting = create(client, stream=True, max_tokens=2)
    narrow.until(lambda s: s.waiting == 1)
    for _ in range(400):
        next(busy)
    busy.close()
    assert [choice.finish_reason for chunk in waiting for choice in chunk.choices if choice.finish_reason] == ["length"]


def test_a_request_that_takes_too_long(tiny_path: Path) -> None:
    limits = Limits(request_s=0.001)
    with (
        live_server({"tiny": lambda: AsyncLLM(tiny_path)}, limits=limits) as server,
        openai_client(server, unix=True) as client,
    ):
        with pytest.raises(openai.APIStatusError) as found:
            create(client)
        assert (found.value.status_code, found.value.code) == (408, "timeout")
        with pytest.raises(openai.APIError, match=r"longer than the .* s that it may"):
            list(create(client, stream=True))
        with pytest.raises(openai.APIStatusError) as found:
            create(client, prompt="Hello " * 500, echo=True, logprobs=1, max_tokens=0)
        assert (found.value.status_code, found.value.code) == (408, "timeout")
        assert server.until(lambda s: s.running == s.waiting == 0).pages_used == 0


def fail(*_: object) -> Any:
    raise RuntimeError("a fault of the test")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails(narrow: LiveServer, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = create(client, stream=True)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail)
        with pytest.raises(openai.APIError, match="engine stopped"):
            list(stream)
    assert create(client, max_tokens=2).usage
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail)
        with pytest.raises(openai.InternalServerError) as found:
            create(client, max_tokens=2)
    assert (found.value.status_code, found.value.code) == (503, "engine_stopped")
    with pytest.raises(openai.InternalServerError):
        create(client, max_tokens=2, stream=True)
    status, _, body = narrow.exchange(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", unix=True)
    assert (status, json.loads(body)["status"]) == (503, "tiny has failed")
