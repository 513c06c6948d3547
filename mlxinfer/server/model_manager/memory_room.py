"""The memory that all models have together: what one needs, what there is, and whether an unloaded one has given its own back."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx

from ...config import EngineArgs
from ...engine.open_model import prepared
from ...loading.memory.budget import BUDGET, MemoryBudget
from ..log import notice
from .model_slot import Slot

_PATIENCE_S = 10.0
"""Seconds that an unloaded model's memory may take to come back before the log says so."""
_LOOK_S = 0.005
_SHARE = 0.5
"""Part of what is left beyond a model's need that it gets where further models may be asked for."""


class Room:
    """What models may take together, as `MemoryBudget` counts it. One at a time for each budget; `close` lifts the limit."""

    def __init__(self, limit: int | None = None, budget: MemoryBudget = BUDGET) -> None:
        """`limit` in bytes; None is what the device has. Models that were loaded before are not counted."""
        self._budget = budget
        self._before = budget.planned
        left = budget.left()
        most = max(left.usable - left.reserved, 0)
        self.limit = most if limit is None else min(limit, most)
        """Bytes that all models may take together."""
        if limit is not None:
            budget.allow(self.limit + self._before)

    def close(self) -> None:
        """Let the process have all memory again."""
        self._budget.allow(None)

    @property
    def planned(self) -> int:
        """Bytes that the plans of loaded models, and of the one being loaded, add up to."""
        return max(self._budget.planned - self._before, 0)

    @property
    def left(self) -> int:
        """Bytes that a further model may have. What an unloaded model has not given back is not among them."""
        left = self._budget.left()
        return max(left.usable - left.reserved, 0)

    def need(self, args: EngineArgs) -> int:
        """Bytes that a model must have: see `Prepared.least`. Reads its headers, so not for the event loop. Raises `MLXInferError`."""
        with prepared(args) as found:
            return found.least(replace(self._budget.left(), usable=self.limit, reserved=0))

    def given(self, args: EngineArgs, need: int, others: Iterable[Slot]) -> EngineArgs:
        """The same with the memory that the model gets: what it needs and half of the rest, or all of the rest where no other model could
        ask for it."""
        alone = all(slot.state == "ready" or slot.pinned for slot in others)
        most = need + int((self.left - need) * (1.0 if alone else _SHARE))
        if args.memory_gb is not None:
            most = min(most, max(int(args.memory_gb * 1e9), need))
        return replace(args, memory_gb=most / 1e9)

    async def returned(self, slot: Slot) -> None:
        """Wait until nothing of an unloaded model is left in memory, and MLX has given it back to the system."""
        began = time.monotonic()
        mx.clear_cache()
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
        mx.clear_cache()
