"""Hundreds of hostile requests: connections end, nothing leaks, and the next good request is answered."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import psutil
import pytest
from support.hostile.cases import LIMITS, cases, request
from support.hostile.client import Report, play
from support.http.http_answers import statuses
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.settings import Limits

CONTEXT = 256
"""Tokens of the context, so that requests for longer answers end early."""
ENDED_S = 60
"""Seconds, far above the sum of the server's limits, for machines under load."""
GOOD = request(
    "/v1/completions",
    json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}).encode(),
    "Content-Type: application/json",
)
GROWTH = 96 * 2**20
"""Bytes by which the process may grow, because allocators retain some memory."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=CONTEXT)
    with live_server({"tiny": lambda: AsyncLLM(path)}, limits=Limits(**LIMITS)) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture(scope="module")
def document(target: LiveServer) -> dict[str, Any]:
    found = json.loads(target.exchange(request("/openapi.json", method="GET"))[2])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Errors logged by any part of the server."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Collect(logging.ERROR)
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


def answer(live: LiveServer) -> str:
    status, _, body = live.exchange(GOOD, unix=True)
    assert status == 200
    return str(json.loads(body)["choices"][0]["text"])


def until(condition: Callable[[], bool], what: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def survives(live: LiveServer, document: dict[str, Any], errors: list[str], seed: int, count: int) -> Report:
    expected = answer(live)
    asyncio.run(play(live, cases(seed + 1, 60, document), ENDED_S))  # lasting threads and buffers
    settled(live)
    process = psutil.Process()
    files, threads, memory = process.num_fds(), process.num_threads(), process.memory_info().rss
    done, reports = 0, []
    made = cases(seed, count, document)
    while done < count:
        some = list(islice(made, 500))
        reports.append(asyncio.run(play(live, some, ENDED_S)))
        done += len(some)
        assert answer(live) == expected
    faults = [fault for report in reports for fault in report.faults]
    assert not faults, (len(faults), faults[:20])
    assert not errors, (len(errors), errors[:3])
    settled(live)
    until(lambda: process.num_fds() <= files, lambda: (files, process.open_files(), process.net_connections("all")))
    assert process.num_threads() <= threads + 32  # asyncio's own pool, which grows up to this size
    assert process.memory_info().rss - memory < GROWTH
    assert live.stats().restarts == 0
    answered = sum((report.answered for report in reports), start=type(reports[0].answered)())
    return Report(done, answered, faults, max(report.longest_s for report in reports))


def settled(live: LiveServer) -> None:
    """Wait until no connection, task, request or page is left."""
    state = live.server.server_state
    until(lambda: not state.connections and not state.tasks, lambda: (state.connections, state.tasks))
    stats = live.until(lambda s: s.running == s.waiting == s.pages_used == 0, seconds=30)
    assert stats.pages > 0
    gc.collect()


@pytest.mark.long
def test_some_hundreds(target: LiveServer, document: dict[str, Any], errors: list[str]) -> None:
    report = survives(target, document, errors, seed=1, count=400)
    assert {200, 400, 403, 404, 405, 413, 415, 431} <= set(report.answered)


@pytest.mark.slow
def test_twenty_thousand(target: LiveServer, document: dict[str, Any], errors: list[str]) -> None:
    report = survives(target, document, errors, seed=2, count=20_000)
    print(report.played, dict(report.answered), f"{report.longest_s:.1f} s")  # noqa: T201


def test_a_bias_of_no_token_leaves_the_engine_alone(target: LiveServer) -> None:
    body = {"model": "tiny", "prompt": "Hello", "logit_bias": {"99999": 1}}
    status, _, found = target.exchange(request("/v1/completions", json.dumps(body).encode(), "Content-Type: application/json"))
    assert (status, json.loads(found)["error"]["param"]) == (400, "logit_bias")
    assert answer(target)
    assert target.stats().restarts == 0


def received(live: LiveServer, *parts: bytes) -> list[int]:
    """The statuses of all answers until the server ends the connection."""
    with live.connect(unix=True) as connection:
        found = b""
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        while piece := connection.recv(65536):
            found += piece
        return [status for status, _ in statuses(found)]


def test_a_body_of_two_lengths_is_not_read(target: LiveServer) -> None:
    hidden = request("/v1/models", method="GET")
    raw = request("/v1/completions", b"", "Content-Type: application/json", "Transfer-Encoding: chunked", "Content-Length: 5", length=False)
    assert received(target, raw + b"0\r\n\r\n" + hidden) == [400]


def test_nothing_follows_the_refusal_of_a_broken_body(target: LiveServer, errors: list[str]) -> None:
    refused = request("/v1/completions", b"", "Content-Type: text/plain", "Transfer-Encoding: chunked", length=False)
    assert received(target, refused, b"no chunk\r\n") == [415]
    assert received(target, GOOD.replace(b"Content-Length", b"X: y\r\nTransfer-Encoding: chunked\r\nX-Length") + b"\r\n") == [400]
    assert not errors


def test_whoever_has_sent_the_next_request_can_leave_as_well(target: LiveServer) -> None:
    """The next request has been sent, although the server reads nothing more of the connection."""
    body = json.dumps({"model": "tiny", "prompt": ["Hello"] * 60, "max_tokens": CONTEXT - 8, "n": 2}).encode()
    long = request("/v1/completions", body, "Content-Type: application/json")
    before = target.stats().completion_tokens
    with target.connect(unix=True) as connection:
        connection.sendall(long)
        target.until(lambda s: s.running > 0)
        connection.sendall(long)
        time.sleep(0.05)
    assert target.until(lambda s: s.running == s.waiting == 0).completion_tokens - before < 60 * 2 * CONTEXT / 2
