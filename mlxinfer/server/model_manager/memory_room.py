"""The memory that all models of the server share."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from ...config import EngineArgs
from ...engine.open_model import prepare_models
from ...loading.memory.budget import BUDGET, MemoryBudget
from ...util.device import clear_cache
from ..log import notice
from .model_slot import ModelSlot

_PATIENCE_S = 10.0
"""Seconds before the log reports that an unloaded model is still in memory."""
_LOOK_S = 0.005
_SHARE = 0.5
"""Part of the memory beyond its minimum that a model gets if requests may ask for further models."""


class MemoryRoom:
    """The memory for models, as counted by `MemoryBudget`. Only one `MemoryRoom` may use a budget at a time; `close` lifts the limit."""

    def __init__(self, limit: int | None = None, budget: MemoryBudget = BUDGET) -> None:
        """`limit` in bytes; None allows all memory of the device. Models loaded before do not count."""
        self._budget = budget
        self._before = budget.planned
        left = budget.left()
        most = max(left.usable - left.reserved, 0)
        self.limit = most if limit is None else min(limit, most)
        """Bytes for all models together."""
        if limit is not None:
            budget.allow(self.limit + self._before)

    def close(self) -> None:
        """Allow the process all memory again."""
        self._budget.allow(None)

    @property
    def planned(self) -> int:
        """Planned bytes of all loaded models and of the model that is being loaded."""
        return max(self._budget.planned - self._before, 0)

    @property
    def left(self) -> int:
        """Bytes available for a further model. Memory that an unloaded model has not returned yet does not count."""
        left = self._budget.left()
        return max(left.usable - left.reserved, 0)

    def need(self, args: EngineArgs) -> int:
        """Minimum bytes for a model: see `PreparedModels.least`. Reads the model's headers: do not call on the event loop. Raises
        `MLXInferError`."""
        with prepare_models(args) as found:
            return found.least(replace(self._budget.left(), usable=self.limit, reserved=0))

    def grant(self, args: EngineArgs, need: int, others: Iterable[ModelSlot]) -> EngineArgs:
        """`args` with the memory that the model gets: `need` bytes and half of the rest, or all of the rest if every other model is loaded
        or pinned."""
        alone = all(slot.state == "ready" or slot.pinned for slot in others)
        most = need + int((self.left - need) * (1.0 if alone else _SHARE))
        if args.memory_gb is not None:
            most = min(most, max(int(args.memory_gb * 1e9), need))
        return replace(args, memory_gb=most / 1e9)

    async def wait_until_freed(self, slot: ModelSlot) -> None:
        """Wait until the unloaded model has left memory and MLX has returned it to the system."""
        began = time.monotonic()
        clear_cache()
        if self._budget.left_over:
            gc.collect()
        while slot.model is not None and slot.model() is not None:
            if time.monotonic() - began > _PATIENCE_S:
                note = "an unloaded model is still in memory: something else in this process uses it"
                notice(note, level=logging.WARNING, model=slot.name)
                break
            gc.collect()
            await asyncio.sleep(_LOOK_S)
        slot.model = None
        clear_cache()
