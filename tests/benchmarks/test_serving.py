"""The study of the cost of HTTP, with tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import tiny_directory

from benchmarks.batch.workloads import LLAMA_SERVER, OURS
from benchmarks.common.samples import SECONDS, Results, Sample
from benchmarks.serving import client, report
from benchmarks.serving.subjects import Engine, OtherLlamaServer, OurServer
from benchmarks.serving.worker import create
from benchmarks.serving.workloads import ENGINE, SHORT, bare_name, served_name, step_name
from mlxinfer.engine.async_llm import AsyncLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[LiveServer]:
    with live_server({"bench": lambda: AsyncLLM(model)}) as server:
        yield server


@pytest.fixture
def served(live: LiveServer) -> OurServer:
    subject = OurServer()
    subject.listen(live.url, "")
    return subject


def test_times_of_a_stream_are_in_order(live: LiveServer) -> None:
    times = asyncio.run(client.stream(live.port, {"model": "bench", "prompt": "x", "max_tokens": 500}, 500))
    assert 0 < times.byte <= times.first < times.last


def test_a_refused_request_is_an_error(live: LiveServer) -> None:
    with pytest.raises(ValueError, match="not served here"):
        asyncio.run(client.stream(live.port, {"model": "other", "prompt": "x"}, 2))
    with pytest.raises(ValueError, match="not served here"):
        asyncio.run(client.whole(live.port, [{"model": "other", "prompt": "x"}], 1))


def test_the_server_and_the_engine_do_the_same_jobs(served: OurServer, model: Path, live: LiveServer) -> None:
    engine = Engine()
    engine.load(str(model), threads=1, context=128)
    try:
        for subject in (served, engine):
            before = live.stats("bench").completion_tokens
            assert subject.step(["one", "two"], 100)["seconds"] > 0
            assert set(subject.connect("one", 2)) == {"byte", "first"}
            assert subject.short(["a", "b", "c"], 2, 3)["seconds"] > 0
            if subject is served:
                live.until(lambda s: s.running == 0, "bench")
                assert live.stats("bench").completion_tokens - before == 2 * 100 + 3 * 2 + 3 * 3
    finally:
        engine.close()


@pytest.mark.long
def test_both_of_a_pair_are_measured(model: Path) -> None:
    engine = Engine()
    engine.load(str(model), threads=1, context=4096)
    try:
        found = engine.pairs(["one", "two"], 500, 3)["pairs"]
    finally:
        engine.close()
    assert len(found) == 3
    assert all(bare > 0 and served > 0 for bare, served in found)


def test_every_name_has_a_subject() -> None:
    assert [type(create(name)) for name in (ENGINE, OURS, LLAMA_SERVER)] == [Engine, OurServer, OtherLlamaServer]


def sample(engine: str, work: str, number: int, value: float) -> Sample:
    return Sample("tiny", work, engine, number, 0, 1, 1, value, SECONDS)


@pytest.mark.parametrize(("last", "said"), [(0.0100, "2.0%"), (0.0110, "4.0%")])
def test_overhead_is_of_pairs(last: float, said: str) -> None:
    values = {bare_name: (0.010, 0.020, 0.010), served_name: (0.0102, 0.0208, last)}
    samples = [sample(ENGINE, name(1), n, value) for name, found in values.items() for n, value in enumerate(found)]
    steps = [sample(ENGINE, step_name(1), 0, 0.01), sample(OURS, step_name(1), 0, 0.0102), sample(OURS, SHORT, 0, 25.0)]
    results = Results("tiny", [*samples, *steps])
    assert [round(value, 6) for value in report.overhead(results, 1)] == sorted([0.02, 0.04, round(last / 0.01 - 1, 6)])
    (line,) = report.overheads(results)
    assert line.startswith(f"The server adds {said} to a step of 1 stream (median of 3 pairs")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture: Any = pytest.importorskip("benchmarks.serving.picture")
    picture.draw(Results("tiny", [sample(ENGINE, step_name(1), 0, 0.01)]), tmp_path / "x.svg", "")
    assert (tmp_path / "x.svg").stat().st_size > 1000
