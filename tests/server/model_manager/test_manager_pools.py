"""Pools of experts shrink for another model before any model is unloaded."""

from __future__ import annotations

import asyncio
from typing import Any

from support.http.instant_models import EndlessRoom, Model, within

from mlxinfer.config import EngineArgs
from mlxinfer.errors import EngineError
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.model_slot import ModelSlot

SIZES = {"sparse": (80, 50), "small": (60, 0), "large": (75, 0)}
"""Bytes of each model, and those of its pools that it can spare."""


class Pooled(Model):
    def __init__(self, args: EngineArgs, room: SharedRoom) -> None:
        super().__init__(args)
        self.memory_bytes, self.spare_expert_bytes = SIZES[str(args.path_or_id)]
        self.asked: list[int] = []
        self.fails = False
        room.models.append(self)

    async def shrink_experts(self, nbytes: int) -> int:
        self.asked.append(nbytes)
        if self.fails:
            raise EngineError("the engine is down")
        given = min(nbytes, self.spare_expert_bytes)
        self.spare_expert_bytes -= given
        self.memory_bytes -= given
        return given


class SharedRoom(EndlessRoom):
    """Memory of 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Pooled] = []

    @property
    def left(self) -> int:  # type: ignore[override]
        return 100 - sum(model.memory_bytes for model in self.models if not model.ended)

    def need(self, args: EngineArgs) -> int:
        return SIZES[str(args.path_or_id)][0]


def loaded(*names: str, fails: bool = False) -> tuple[dict[str, Any], list[Pooled]]:
    """The states of all models after requests for these, and the models that were loaded."""
    room = SharedRoom()
    slots = {name: ModelSlot(EngineArgs(name), lambda args: Pooled(args, room)) for name in SIZES}  # type: ignore[arg-type, return-value]
    for name, slot in slots.items():
        slot.names.append(name)

    async def run() -> None:
        manager = ModelManager(slots.values(), room, dwell_s=0)  # type: ignore[arg-type]
        for name in names:
            await within(manager.acquire(slots[name]))
            manager.release(slots[name])
            room.models[0].fails = fails

    asyncio.run(run())
    return {name: slot.state for name, slot in slots.items()}, room.models


def test_a_pool_gives_what_the_other_model_lacks():
    states, models = loaded("sparse", "small")
    assert (states["sparse"], states["small"]) == ("ready", "ready")
    assert models[0].asked == [40]
    assert models[0].memory_bytes == 40


def test_a_model_is_unloaded_if_its_pool_is_too_small():
    states, models = loaded("sparse", "large")
    assert (states["sparse"], states["large"]) == ("listed", "ready")
    assert models[0].asked == [55]


def test_an_engine_that_has_ended_gives_nothing():
    states, _ = loaded("sparse", "small", fails=True)
    assert (states["sparse"], states["small"]) == ("listed", "ready")
