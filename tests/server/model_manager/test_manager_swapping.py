"""Known faults of other engines that swap models, with memory for one tiny model unless a test needs more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.http.kept_models import ROOM_FOR_ONE, Kept, kept_models, read_all, tiny_models


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("several"), "abc")


@pytest.fixture(scope="module")
def server(paths: dict[str, Path]) -> Iterator[Kept]:
    with kept_models(paths) as kept:
        yield kept


@pytest.fixture
def kept(server: Kept) -> Kept:
    server.reset()
    return server


@pytest.fixture(autouse=True)
def never_above_the_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        assert request.getfixturevalue("server").watch.most_planned <= ROOM_FOR_ONE


def test_a_busy_model_is_not_unloaded_in_the_middle_of_an_answer(kept: Kept) -> None:
    streaming = kept.begin("a")
    kept.until_busy("a")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(kept.ask, "b")
        body = read_all(streaming)
        assert (body.count('"finish_reason":"length"'), body.strip()[-6:]) == (4, "[DONE]")
        assert other.result()[0] == 200
    assert kept.watch.events == [("open", "a"), ("back", "a"), ("open", "b")]


def test_a_model_is_not_unloaded_while_it_is_loaded(kept: Kept) -> None:
    gate = kept.watch.gates["a"] = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.ask, "a")
        kept.until(lambda: kept.slots["a"].state == "loading")
        second = pool.submit(kept.ask, "b")
        kept.until(lambda: len(kept.slots["b"].waiting) == 1)
        time.sleep(0.05)
        assert kept.states() == {"a": "loading", "b": "listed", "c": "listed"}
        gate.set()
        assert (first.result()[0], second.result()[0]) == (200, 200)
    assert kept.watch.events == [("open", "a"), ("back", "a"), ("open", "b")]


def test_a_model_is_not_unloaded_between_its_load_and_the_request_for_it(kept: Kept) -> None:
    """Both requests wait before either model is loaded: each model is loaded once and answers."""
    gate = kept.watch.gates["c"] = threading.Event()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(kept.ask, "c")
        kept.until(lambda: kept.slots["c"].state == "loading")
        others = []
        for number in range(8):
            name = "ab"[number % 2]
            others.append(pool.submit(kept.ask, name))
            kept.until(lambda name=name, number=number: len(kept.slots[name].waiting) == number // 2 + 1)  # type: ignore[misc]
        gate.set()
        assert [first.result()[0], *(each.result()[0] for each in others)] == [200] * 9
    assert [name for what, name in kept.watch.events if what == "open"] == ["c", "a", "b"]


def test_a_model_that_is_always_busy_does_not_keep_another_waiting(kept: Kept) -> None:
    """Requests that arrive after a request for another model wait until that request has been answered."""
    streaming = kept.begin("a")
    kept.until_busy("a")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(kept.ask, "b")
        kept.until(lambda: kept.slots["a"].draining)
        later = pool.submit(kept.ask, "a")
        kept.until(lambda: len(kept.slots["a"].waiting) == 1)
        assert read_all(streaming).strip().endswith("[DONE]")
        assert (other.result()[0], later.result()[0]) == (200, 200)
    assert [name for what, name in kept.watch.events if what == "open"] == ["a", "b", "a"]


def test_of_two_that_wait_for_a_model_one_gives_up(kept: Kept) -> None:
    gate = kept.watch.gates["a"] = threading.Event()
    gone = kept.begin("a")
    kept.until(lambda: kept.slots["a"].state == "loading")
    with ThreadPoolExecutor(2) as pool:
        same, other = pool.submit(kept.ask, "a"), pool.submit(kept.ask, "b")
        kept.until(lambda: kept.slots["a"].users == 2 and kept.slots["b"].users == 1)
        gone.close()
        kept.until(lambda: kept.slots["a"].users == 1)
        gate.set()
        assert (same.result()[0], other.result()[0]) == (200, 200)


def test_who_gives_up_before_its_model_is_loaded_costs_no_load(kept: Kept) -> None:
    streaming = kept.begin("a")
    kept.until_busy("a")
    gone = kept.begin("b")
    kept.until(lambda: kept.slots["b"].users == 1 and kept.slots["a"].draining)
    gone.close()
    kept.until(lambda: kept.slots["b"].users == 0 and not kept.slots["a"].draining)
    assert kept.ask("a")[0] == 200
    assert read_all(streaming).strip().endswith("[DONE]")
    assert kept.watch.events == [("open", "a")]


def test_what_is_planned_counts_and_not_what_is_in_use(kept: Kept) -> None:
    """The first model's cache is nearly empty, so its memory in use and the other's plan would fit together."""
    assert kept.ask("a")[0] == 200
    kept.until(lambda: kept.slots["a"].idle)
    planned = kept.slots["a"].planned
    assert kept.ask("b")[0] == 200
    assert kept.slots["a"].state == "listed"
    assert planned + kept.slots["b"].planned > ROOM_FOR_ONE


def test_the_log_says_once_that_two_models_do_not_fit_together(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlxinfer")
    kept.live.served.manager._logged_swaps.clear()
    for name in "abab":
        assert kept.ask(name)[0] == 200
        kept.until(lambda name=name: kept.slots[name].idle)  # type: ignore[misc]
    (said,) = [record.getMessage() for record in caplog.records if "do not fit together" in record.getMessage()]
    assert said.startswith("unloads a: they do not fit together (")
    assert "--max-context" in said


def test_the_next_load_waits_for_the_memory_of_the_last_model(kept: Kept) -> None:
    assert kept.ask("a")[0] == 200
    llm = kept.slots["a"].llm
    assert llm is not None
    model = llm.loaded.model
    del llm
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(kept.ask, "b")
        kept.until(lambda: kept.slots["a"].state == "unloading")
        time.sleep(0.2)
        assert kept.watch.events == [("open", "a")]
        del model
        assert other.result()[0] == 200
    assert kept.watch.events == [("open", "a"), ("back", "a"), ("open", "b")]


def test_many_requests_for_a_model_load_it_once(kept: Kept) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert {each[0] for each in pool.map(kept.ask, "a" * 16)} == {200}
    assert kept.watch.events == [("open", "a")]
