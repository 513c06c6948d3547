"""What the models of this process take together: each plan gets what the others leave, and MLX's limits are those of all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import RLock
from weakref import WeakSet

import mlx.core as mx

from ...errors import MemoryPlanError
from ...util.device import DeviceMemory, device_memory, lift_limits, limit_memory
from .plan import MemoryPlan

MakePlan = Callable[[DeviceMemory], MemoryPlan]
"""Plans with this memory."""


class Reservation:
    """The memory of one model, held until it is released or nobody refers to it."""

    def __init__(self, budget: MemoryBudget, plan: MemoryPlan) -> None:
        self.plan = plan
        """What the memory is used for."""
        self._budget = budget

    def take(self, wanted: int) -> int:
        """Let the weights grow by `wanted` bytes, or by as many of them as the plan has left and nobody else uses. Returns how many."""
        return self._budget.take(self, wanted)

    def release(self) -> None:
        """Let others have the memory. Harmless if that was done."""
        self._budget.release(self)


class MemoryBudget:
    """The memory of a process, of which plans reserve their parts. May be used from any thread."""

    def __init__(self, memory: Callable[[], DeviceMemory] = device_memory, active: Callable[[], int] = mx.get_active_memory) -> None:
        """`memory` is what there is; `active` tells the bytes that MLX holds."""
        self._memory = memory
        self._active = active
        self._lock = RLock()  # a reservation that is collected as garbage may be released at any moment
        self._held: WeakSet[Reservation] = WeakSet()
        self._before = 0
        """Bytes that MLX held before the first of them."""
        self._allowed: int | None = None
        """Bytes that all plans may have together; None is all there are."""

    def allow(self, nbytes: int | None) -> None:
        """Let all plans together have so many bytes, and no more than there are. Plans that hold more keep it."""
        with self._lock:
            self._allowed = nbytes
            if not self._held:
                self._before = self._active()

    @property
    def planned(self) -> int:
        """Bytes that plans have reserved."""
        with self._lock:
            return self._used()

    @property
    def left_over(self) -> int:
        """Bytes that MLX holds more than before the first plan and than all plans: those of closed models, at least."""
        with self._lock:
            return max(self._others() - self._before, 0)

    @property
    def reserved(self) -> int:
        """Bytes that plans have reserved, and that MLX holds besides."""
        with self._lock:
            return self._used() + self._others()

    def reserve(self, make: MakePlan) -> Reservation:
        """Plan with what is left. Raises what `make` raises; where that is a `MemoryPlanError`, only after what nobody uses any more has
        been given back."""
        with self._lock:
            try:
                plan = make(self.left())
            except MemoryPlanError:
                if not self.reserved:
                    raise
                gc.collect()
                mx.clear_cache()
                plan = make(self.left())
            held = Reservation(self, plan)
            if not self._held:
                self._before = self._active()
            self._held.add(held)
            self._limit()
        return held

    def take(self, held: Reservation, wanted: int) -> int:
        """See `Reservation.take`."""
        with self._lock:
            if held not in self._held:
                return 0
            left = self.left()
            taken = max(min(wanted, held.plan.left, left.usable - left.reserved), 0)
            held.plan = replace(held.plan, weights=held.plan.weights + taken)
            self._limit()
            return taken

    def release(self, held: Reservation) -> None:
        """See `Reservation.release`."""
        with self._lock:
            if held in self._held:
                self._held.discard(held)
                self._limit()

    def left(self) -> DeviceMemory:
        """The memory, and how much of it is reserved."""
        with self._lock:
            memory, reserved = self._memory(), self.reserved
            # What was there before any model is no part of what models may have; what a closed one has not given back yet is.
            own = self._used() + self.left_over
            if self._allowed is None or memory.usable - reserved <= self._allowed - own:
                return replace(memory, reserved=reserved)
            return replace(memory, usable=min(memory.usable, self._allowed), reserved=own, source="what models may take together")

    def _used(self) -> int:
        return sum(each.plan.used for each in self._held)

    def _others(self) -> int:
        """Bytes that belong to no plan: what was there before, as far as it can still be there, or what is more than all plans."""
        active = self._active()
        return max(min(self._before, active), active - self._used()) if self._held else active

    def _limit(self) -> None:
        plans = [each.plan for each in self._held]
        if not plans:
            lift_limits()
            return
        most = self._others() + sum(plan.limit for plan in plans)
        limit_memory(wired=self._used(), spare=sum(plan.step for plan in plans), most=min(most, self._memory().usable))


_LITTLE = 0.01
"""Share of a plan's memory that nothing fills because it is less than a page."""

BUDGET = MemoryBudget()
"""That of this process."""


def shares(weights: Sequence[int], plans: Sequence[MakePlan], memory: DeviceMemory) -> list[int]:
    """Bytes for each of several models that are to be loaded together: its weights and an equal part of the rest, and what one of them
    cannot use goes to the others. Raises `MemoryPlanError` where one does not fit in its share."""
    count = len(weights)
    rest = max(memory.usable - memory.reserved - sum(weights), 0) // count
    given = [own + rest for own in weights]
    source = f"a share of the {memory.source} for {count} models"
    made = [plan(replace(memory, usable=size, reserved=0, source=source)) for plan, size in zip(plans, given, strict=True)]
    short = [i for i, plan in enumerate(made) if plan.left < _LITTLE * plan.limit]
    spare = sum(plan.left for plan in made) // max(len(short), 1)
    return [plan.used + spare if i in short else plan.used for i, plan in enumerate(made)] if short else given
