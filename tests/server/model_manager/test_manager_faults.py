"""Rare faults of the model manager, tested alone with models that load at once."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.http.instant_models import EndlessRoom, slot_of, within

from mlxinfer.config import EngineArgs
from mlxinfer.errors import CheckpointError
from mlxinfer.server.errors import APIError
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.model_slot import Failure
from mlxinfer.server.model_manager.refusals import not_loaded, without_paths


def test_a_fault_of_one_load_leaves_nobody_waiting_for_other_models(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        a, b = slot_of("a"), slot_of("b")
        manager = ModelManager([a, b], EndlessRoom({"a": ValueError("no user's error")}))  # type: ignore[arg-type]
        first, second = asyncio.ensure_future(manager.acquire(a)), asyncio.ensure_future(manager.acquire(b))
        with pytest.raises(APIError, match="ValueError"):
            await within(first)
        await within(second)
        manager.release(b)
        assert (a.state, b.state) == ("failed", "ready")
        await manager.close()

    logger = logging.getLogger("mlxinfer")
    before, logger.propagate = logger.propagate, True
    try:
        asyncio.run(run())
    finally:
        logger.propagate = before
    assert "no user's error" in caplog.text  # with its trace, for the operator


@pytest.mark.parametrize("loads", [False, True])
def test_who_comes_after_the_end_is_refused(loads: bool) -> None:
    async def run() -> None:
        slot = slot_of("a")
        manager = ModelManager([slot], EndlessRoom())  # type: ignore[arg-type]
        if loads:
            manager.start_loading(slot)  # its task has not begun when the server ends
            await within(manager.close())
        else:
            await manager.close()
            with pytest.raises(APIError, match="shutting down"):
                await within(manager.acquire(slot))
        assert (slot.state, slot.users) == ("listed", 0)

    asyncio.run(run())


def test_an_unloading_that_was_asked_for_ends_with_a_load_that_failed() -> None:
    async def run() -> None:
        slot = slot_of("a")
        room = EndlessRoom({"a": CheckpointError("not now")})
        manager = ModelManager([slot], room)  # type: ignore[arg-type]
        with pytest.raises(APIError):
            await within(manager.acquire(slot, 0.0))
        room.faults.clear()
        assert slot.failure is not None
        slot.failure.retry_at = 0.0
        await within(manager.acquire(slot))
        assert slot.keep_alive_s == slot.default_keep_alive_s
        manager.release(slot)
        await manager.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("/Volumes/My Disk/of John/a model: no file", "a model: no file"),
        ("cannot read '/Volumes/My Disk/of John/a model/config.json' or /etc/passwd", "cannot read 'a model/config.json' or passwd"),
        ("/Users/john's stuff/adapters (new)/one/adapter_config.json is corrupt", "one/adapter_config.json is corrupt"),
    ],
)
def test_clients_are_not_told_folders_with_spaces(reason: str, told: str) -> None:
    slot = slot_of("/Volumes/My Disk/of John/a model")
    slot.args = EngineArgs("/Volumes/My Disk/of John/a model", adapters={"one": "/Users/john's stuff/adapters (new)/one"})
    slot.failure = Failure(CheckpointError(reason), 0.0)
    assert not_loaded(slot).message.partition("loaded: ")[2] == told


def test_the_last_parts_of_paths_stay() -> None:
    assert without_paths("no /a/b/c.gguf, ~/d/e, ./f/g") == "no c.gguf, e, g"
