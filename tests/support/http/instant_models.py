"""Models that load at once, and memory without a limit: for tests of the model manager alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from mlxinfer.config import EngineArgs
from mlxinfer.server.model_manager.model_slot import ModelSlot
from mlxinfer.types import EngineStats


class Model:
    """The parts of an `AsyncLLM` that the manager uses."""

    notes: tuple[str, ...] = ()
    memory_bytes = 1
    spare_expert_bytes = 0
    plan = SimpleNamespace(in_use=lambda stats: 1)
    ended = False

    def __init__(self, args: EngineArgs) -> None:
        self.loaded = SimpleNamespace(model=self)
        self.end: Future[None] = Future()

    async def ready(self) -> None:
        pass

    async def close(self) -> None:
        self.ended = True
        self.end.set_result(None)

    def stats(self) -> EngineStats:
        return EngineStats()


class EndlessRoom:
    """A room in which every model fits."""

    planned, limit, left = 0, 100, 100

    def __init__(self, faults: dict[str, Exception] | None = None) -> None:
        self.faults = faults or {}

    def need(self, args: EngineArgs) -> int:
        if args.path_or_id in self.faults:
            raise self.faults[args.path_or_id]
        return 1

    def grant(self, args: EngineArgs, need: int, others: Any) -> EngineArgs:
        return args

    async def wait_until_freed(self, slot: ModelSlot) -> None:
        pass

    def close(self) -> None:
        pass


def slot_of(path: str) -> ModelSlot:
    slot = ModelSlot(EngineArgs(path), Model)  # type: ignore[arg-type]
    slot.names.append(path)
    return slot


async def within(work: Any) -> Any:
    """The result; fails instead of waiting for ever."""
    return await asyncio.wait_for(work, 60)
