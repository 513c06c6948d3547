"""Many clients at once, a fifth of them disconnecting: the others get the same answers as alone, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server
from support.http.load import Answer, Job, ask, kinds

from mlxinfer.engine.async_llm import AsyncLLM

ABANDONED = 0.2


@pytest.fixture(scope="module")
def steady(tiny_path: Path) -> Iterator[LiveServer]:
    """A model whose answers do not depend on other requests in the batch."""
    with live_server({"tiny": lambda: AsyncLLM(tiny_path, deterministic=True)}) as server:
        yield server


def counters(live: LiveServer) -> dict[str, float]:
    _, _, body = live.exchange(request("/metrics", method="GET"), unix=True)
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            route = sample.labels.get("path", "")
            if not route or route.startswith("/v1/"):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def together(live: LiveServer, jobs: list[Job], leaving: dict[int, float], connections: int) -> dict[int, Answer]:
    """Answers of the clients that stay."""
    waiting = iter(enumerate(jobs))
    found: dict[int, Answer] = {}

    async def client(number: int) -> None:
        for index, job in waiting:
            answer = await ask(live, job, unix=number % 2 == 0, leave=leaving.get(index))
            if answer is not None:
                found[index] = answer

    await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(connections))), 600)
    return found


def holds(live: LiveServer, *, requests: int, connections: int, seed: int) -> None:
    chance = random.Random(seed)
    different = kinds(max(requests // 8, 8), seed)
    alone = {job: asyncio.run(ask(live, job, unix=True)) for job in different}
    jobs = [chance.choice(different) for _ in range(requests)]
    leaving = {index: chance.random() for index in chance.sample(range(requests), round(requests * ABANDONED))}
    live.until(lambda s: s.running == s.waiting == 0)
    before, steps = counters(live), live.stats().steps
    found = asyncio.run(together(live, jobs, leaving, connections))
    assert sorted(found) == [index for index in range(requests) if index not in leaving]
    for index, answer in found.items():
        assert answer == alone[jobs[index]], jobs[index]
    stats = live.until(lambda s: s.running == s.waiting == s.pages_used == 0)
    assert (stats.restarts, stats.steps > steps) == (0, True)
    state = live.server.server_state
    live.until(lambda s: not state.connections and not state.tasks)
    after = counters(live)

    def more(name: str) -> float:
        return after[f"mlxinfer_{name}"] - before.get(f"mlxinfer_{name}", 0)

    whole, answers = len(found), sum(len(answer.texts) for answer in found.values())
    tokens = sum(answer.tokens for answer in found.values())
    assert more("http_requests_total") == requests
    assert 0 < more("requests_cancelled_total") <= len(leaving)
    assert whole <= more("e2e_request_latency_seconds_count") - more("requests_cancelled_total") <= requests
    assert more("request_success_total") >= answers
    assert more("generation_tokens_total") >= tokens
    assert more("request_generation_tokens_count") == more("request_success_total")
    assert more("request_generation_tokens_sum") == more("generation_tokens_total")
    assert after["mlxinfer_num_requests_running"] == after["mlxinfer_num_requests_waiting"] == after["mlxinfer_kv_cache_usage_perc"] == 0


def test_some_clients(steady: LiveServer) -> None:
    holds(steady, requests=60, connections=16, seed=3)


@pytest.mark.slow
def test_five_hundred_requests_of_64_connections(steady: LiveServer) -> None:
    holds(steady, requests=500, connections=64, seed=4)


def test_nothing_that_is_sent_waits_for_more(steady: LiveServer) -> None:
    with steady.connect(unix=False) as connection:
        connection.sendall(request("/health", method="GET"))
        assert connection.recv(1)
        (served,) = steady.server.server_state.connections
        assert served.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # type: ignore[union-attr]
