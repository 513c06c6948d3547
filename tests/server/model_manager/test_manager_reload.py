"""A model whose engine has failed for good is loaded again, and watching clients see every state."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.hostile.cases import request
from support.http.instant_models import EndlessRoom, Model, slot_of, within
from support.http.kept_models import kept_models, tiny_models

from mlxinfer.errors import CheckpointError, EngineError
from mlxinfer.server.errors import APIError, stopping
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.model_slot import MOST_DEATH_BACK_OFF_S, Failure, ModelSlot, death_back_off_s


def kill(slot: ModelSlot) -> None:
    model = slot.llm
    assert isinstance(model, Model)
    model.name, model.ended = "a", True  # type: ignore[attr-defined]
    model.end.set_result(None)


async def until(slot: ModelSlot, state: str) -> None:
    while slot.state != state:
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the back-off of failed loads."""
    monkeypatch.setattr("mlxinfer.server.model_manager.model_slot._FIRST_BACK_OFF_S", 0.001)


def test_it_comes_back_after_longer_and_longer_waits() -> None:
    async def run() -> None:
        slot, room = slot_of("a"), EndlessRoom()
        manager = ModelManager([slot], room, broken_s=0.05)  # type: ignore[arg-type]
        await within(manager.acquire(slot))
        manager.release(slot)
        waits = []
        for deaths in range(1, 4):
            kill(slot)
            await within(until(slot, "failed"))
            assert slot.broken
            assert slot.failure is not None
            waits.append(slot.failure.retry_at - slot.deaths[-1])
            with pytest.raises(APIError, match="its engine has ended"):
                await within(manager.acquire(slot))  # not during the back-off
            await within(until(slot, "ready"))
            assert (slot.broken, slot.loads) == (False, deaths + 1)
        assert waits == pytest.approx([0.05, 0.1, 0.2], abs=0.02)
        await within(manager.close())

    asyncio.run(run())


def test_a_load_that_fails_on_the_way_back_is_tried_again() -> None:
    async def run() -> None:
        slot, room = slot_of("a"), EndlessRoom()
        manager = ModelManager([slot], room, broken_s=0.01)  # type: ignore[arg-type]
        await within(manager.acquire(slot))
        manager.release(slot)
        room.faults["a"] = CheckpointError("not now")
        kill(slot)
        while slot.failures < 3:
            await asyncio.sleep(0.001)
        assert slot.broken
        room.faults.clear()
        await within(until(slot, "ready"))
        await within(manager.close())

    asyncio.run(within(run()))


@pytest.mark.parametrize("how", ["unloaded", "closed"])
def test_it_stays_away_where_it_should(how: str) -> None:
    async def run() -> None:
        slot = slot_of("a")
        manager = ModelManager([slot], EndlessRoom(), broken_s=0.05)  # type: ignore[arg-type]
        await within(manager.acquire(slot))
        manager.release(slot)
        kill(slot)
        await within(until(slot, "failed"))
        if how == "unloaded":
            manager.unload(slot)
            await asyncio.sleep(0.1)
            assert (slot.state, slot.loads, slot.broken) == ("listed", 1, False)
        await within(manager.close())
        await asyncio.sleep(0.1)
        assert slot.loads == 1

    asyncio.run(run())


def test_the_wait_doubles_within_an_hour_and_has_an_end() -> None:
    deaths = [0.0]
    assert death_back_off_s(deaths, 0.0, 60) == 60
    deaths += [1000.0, 2000.0]
    assert death_back_off_s(deaths, 2000.0, 60) == 240
    assert death_back_off_s(deaths, 4000.0, 60) == 120
    assert deaths == [1000.0, 2000.0]
    assert death_back_off_s([5000.0] * 40, 5000.0, 60) == MOST_DEATH_BACK_OFF_S


def fail() -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_and_the_stream_of_states_over_http(tmp_path: Path) -> None:
    """After an engine has failed twice, /health reports the failure until the model is loaded again without a request."""
    with kept_models(tiny_models(tmp_path, "a"), 500_000_000, broken_s=0.3, aliases={"other": "a"}) as kept:
        connection = kept.live.connect(unix=True)
        connection.sendall(request("/models/sse", method="GET"))
        raw = b""
        while b"\r\n\r\n" not in raw:
            raw += connection.recv(4096)
        assert b"200 OK" in raw
        assert b"text/event-stream" in raw
        assert kept.ask("a")[0] == 200
        assert kept.live.exchange(request("/health", method="GET"), unix=True)[0] == 200
        for _ in range(2):
            with pytest.raises(RuntimeError):
                kept.slots["a"].llm._thread.compute(fail)  # type: ignore[union-attr]
        kept.until(lambda: kept.slots["a"].broken)
        assert kept.live.exchange(request("/health", method="GET"), unix=True)[0] == 503
        kept.until(lambda: kept.slots["a"].state == "ready" and kept.slots["a"].loads == 2)
        assert kept.live.exchange(request("/health", method="GET"), unix=True)[0] == 200
        assert kept.ask("a")[0] == 200
        kept.ask("a", "/models/unload")
        kept.until(lambda: kept.states()["a"] == "listed")
        while raw.count(b"model_status") < 6:
            raw += connection.recv(4096)
        found = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
        assert {(each["model"], each["event"]) for each in found} == {("a", "model_status")}
        told = [each["data"] for each in found]
        assert [each["status"] for each in told] == ["loading", "loaded", "unloaded", "loading", "loaded", "unloaded"]
        assert [each.get("failed", False) for each in told] == [False, False, True, False, False, False]
        assert "failed again after a restart" in told[2]["reason"]
    with connection:  # the server stops although a client listens
        while connection.recv(4096):
            pass


def test_an_attempt_that_is_refused_at_once_is_not_made_again_at_once() -> None:
    class Refusing(ModelManager):
        attempts = 0

        async def acquire(self, slot: ModelSlot, keep_alive_s: float | None = None) -> None:
            self.attempts += 1
            if self.attempts > 5:
                raise AssertionError("the loop never pauses, and nothing else runs")
            raise stopping()

    async def run() -> None:
        slot, ended = slot_of("a"), Future[None]()
        manager = Refusing([slot], EndlessRoom())  # type: ignore[arg-type]
        slot.failure, slot.state = Failure(EngineError("it died"), 0.0, died=True), "failed"
        ended.set_result(None)
        task = asyncio.ensure_future(manager.reload(slot, ended, slot.loads))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert manager.attempts == 1
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
