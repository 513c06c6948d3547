"""The memory budget of this process: each plan gets what other models leave, and MLX's limits cover all models."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import RLock
from weakref import WeakSet

import mlx.core as mx

from ...errors import MemoryPlanError
from ...util.device import DeviceMemory, clear_cache, device_memory, lift_limits, limit_memory
from .plan import MemoryPlan

MakePlan = Callable[[DeviceMemory], MemoryPlan]
"""Plans the use of this memory."""


class Reservation:
    """The memory of one model, reserved until it is released or collected as garbage."""

    def __init__(self, budget: MemoryBudget, plan: MemoryPlan) -> None:
        self.plan = plan
        """Current use of the memory."""
        self._budget = budget

    def take(self, wanted: int) -> int:
        """Let the weights grow by `wanted` bytes, or by as many as the plan has left and no other model uses. Returns the bytes granted."""
        return self._budget.take(self, wanted)

    def resize_pools(self, nbytes: int) -> int:
        """Let the pools of experts take `nbytes`, as far as their minimum and other models allow. Returns the bytes that they may take.

        The caller resizes the pools: before the call if they grow less than planned, at once after it if they shrink.
        """
        return self._budget.resize_pools(self, nbytes)

    def release(self) -> None:
        """Release the memory for other models. Idempotent."""
        self._budget.release(self)


class MemoryBudget:
    """The memory of a process, of which plans reserve parts. Thread-safe."""

    def __init__(self, memory: Callable[[], DeviceMemory] = device_memory, active: Callable[[], int] = mx.get_active_memory) -> None:
        """`memory` returns the device's memory, `active` the bytes that MLX holds."""
        self._memory = memory
        self._active = active
        self._lock = RLock()  # the garbage collector may release a reservation at any moment
        self._held: WeakSet[Reservation] = WeakSet()
        self._before = 0
        """Bytes that MLX held before the first reservation."""
        self._allowed: int | None = None
        """Maximum bytes of all plans together, or None."""

    def allow(self, nbytes: int | None) -> None:
        """Limit all plans together to `nbytes`, at most the device's memory. Plans that hold more keep it."""
        with self._lock:
            self._allowed = nbytes
            if not self._held:
                self._before = self._active()

    @property
    def planned(self) -> int:
        """Bytes reserved by plans."""
        with self._lock:
            return self._planned_bytes()

    @property
    def left_over(self) -> int:
        """Bytes that MLX holds beyond all plans and what it held before the first: mostly memory of closed models."""
        with self._lock:
            return max(self._unplanned_bytes() - self._before, 0)

    @property
    def reserved(self) -> int:
        """Bytes reserved by plans or held by MLX besides."""
        with self._lock:
            return self._planned_bytes() + self._unplanned_bytes()

    def reserve(self, make: MakePlan) -> Reservation:
        """Plan with the free memory. Raises the exceptions of `make`.

        After a `MemoryPlanError`, unused memory is returned and `make` is called once more.
        """
        with self._lock:
            try:
                plan = make(self.left())
            except MemoryPlanError:
                if not self.reserved:
                    raise
                gc.collect()
                clear_cache()
                plan = make(self.left())
            held = Reservation(self, plan)
            if not self._held:
                self._before = self._active()
            self._held.add(held)
            self._set_limits()
        return held

    def take(self, held: Reservation, wanted: int) -> int:
        """See `Reservation.take`."""
        with self._lock:
            if held not in self._held:
                return 0
            left = self.left()
            taken = max(min(wanted, held.plan.left, left.usable - left.reserved), 0)
            held.plan = replace(held.plan, weights=held.plan.weights + taken)
            self._set_limits()
            return taken

    def resize_pools(self, held: Reservation, nbytes: int) -> int:
        """See `Reservation.resize_pools`."""
        with self._lock:
            plan = held.plan
            if held not in self._held or plan.experts is None:
                return 0
            left = self.left()
            most = plan.experts.pools + max(min(plan.left, left.usable - left.reserved), 0)
            pools = plan.experts.resized(min(nbytes, most))
            held.plan = replace(plan, weights=plan.weights - plan.experts.pools + pools.pools, experts=pools)
            self._set_limits()
            return pools.pools

    def release(self, held: Reservation) -> None:
        """See `Reservation.release`."""
        with self._lock:
            if held in self._held:
                self._held.discard(held)
                self._set_limits()

    def left(self) -> DeviceMemory:
        """The memory, and the part of it that is reserved."""
        with self._lock:
            memory, reserved = self._memory(), self.reserved
            # The limit does not count memory in use before the first model. It counts memory that a closed model has not returned.
            own = self._planned_bytes() + self.left_over
            if self._allowed is None or memory.usable - reserved <= self._allowed - own:
                return replace(memory, reserved=reserved)
            return replace(memory, usable=min(memory.usable, self._allowed), reserved=own, source="what models may take together")

    def _planned_bytes(self) -> int:
        return sum(each.plan.used for each in self._held)

    def _unplanned_bytes(self) -> int:
        """Bytes that belong to no plan: those from before the first plan that may still be in use, or those beyond all plans."""
        active = self._active()
        return max(min(self._before, active), active - self._planned_bytes()) if self._held else active

    def _set_limits(self) -> None:
        plans = [each.plan for each in self._held]
        if not plans:
            lift_limits()
            return
        most = self._unplanned_bytes() + sum(plan.limit for plan in plans)
        limit_memory(wired=self._planned_bytes(), spare=sum(plan.peak for plan in plans), most=min(most, self._memory().usable))


_LITTLE = 0.01
"""Share of a plan's memory that stays unused because it is less than a page."""

BUDGET = MemoryBudget()
"""The budget of this process."""


def shares(weights: Sequence[int], plans: Sequence[MakePlan], memory: DeviceMemory) -> list[int]:
    """Bytes for each of several models that are loaded together: its weights and an equal part of the rest.

    Memory that one model cannot use goes to the others. Raises `MemoryPlanError` if a model does not fit in its share.
    """
    count = len(weights)
    rest = max(memory.usable - memory.reserved - sum(weights), 0) // count
    given = [own + rest for own in weights]
    source = f"a share of the {memory.source} for {count} models"
    made = [plan(replace(memory, usable=size, reserved=0, source=source)) for plan, size in zip(plans, given, strict=True)]
    short = [i for i, plan in enumerate(made) if plan.left < _LITTLE * plan.limit]
    spare = sum(plan.left for plan in made) // max(len(short), 1)
    return [plan.used + spare if i in short else plan.used for i, plan in enumerate(made)] if short else given
