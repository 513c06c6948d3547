"""Keeps pools of experts as large as the memory allows: they shrink under memory pressure and for other models, and grow again later."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..loading.memory.budget import Reservation
from ..util.device import memory_limit
from ..util.memory_pressure import Pressure, memory_pressure

if TYPE_CHECKING:
    from ..loading.repack_cache.pooled_experts import PooledExperts

_EVERY_S = 0.5
"""Seconds between two looks at the memory."""
_CALM_LOOKS = 60
"""Looks without pressure before pools grow again."""
_GROWTH = 1 / 8
"""Maximum growth at a time, as a share of the planned bytes."""
_SPARE_SHARE = 0.5
"""Share of the spare memory that pools may take at a time."""


class PoolGuard:
    """Decides the bytes of one model's pools. The engine resizes them between two steps."""

    def __init__(
        self, experts: PooledExperts, reservation: Reservation, look: Callable[[], Pressure] = lambda: memory_pressure(memory_limit()[0])
    ) -> None:
        """`look` returns the pressure on this machine's memory. `start` begins to watch the memory."""
        pools = reservation.plan.experts
        assert pools is not None
        self._experts, self._reservation, self._look = experts, reservation, look
        self.planned = pools.pools
        """Bytes of the pools when the model was loaded, which they never exceed."""
        self.allowed = pools.pools
        """Present bytes of the pools, or those that the engine has been asked for."""
        self._least = pools.least
        self._calm = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.wake: Callable[[], None] = lambda: None
        """Called when the engine should resize the pools, which an idle one would do at its next step."""

    def start(self) -> None:
        """Watch the memory in a thread, until `close` or until the guard is garbage."""
        arguments = (weakref.ref(self), self._closing)
        threading.Thread(target=_watch, args=arguments, name="mlxinfer-memory", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    def check(self) -> None:
        """Look at the memory once. Pools shrink by what is short, and grow after `_CALM_LOOKS` looks without pressure."""
        pressure = self._look()
        with self._lock:
            if pressure.short:
                self._calm = 0
                if self.allowed > self._least:
                    self._set(self.allowed - pressure.short)
                return
            self._calm += 1
            if self._calm >= _CALM_LOOKS and self.allowed < self.planned:
                self._calm = 0
                growth = min(int(pressure.spare * _SPARE_SHARE), int(self.planned * _GROWTH))
                self._set(self.allowed + growth)

    def give(self, nbytes: int) -> int:
        """Give up to `nbytes` of the pools to another model. Returns the bytes that are free after the engine's next step.

        The pools grow again as memory allows, when the other model is gone.
        """
        with self._lock:
            before = self.allowed
            self._calm = 0
            self._set(before - nbytes)
            return before - self.allowed

    @property
    def can_give(self) -> int:
        """Bytes of the pools beyond their minimum."""
        return max(self.allowed - self._least, 0)

    def _set(self, nbytes: int) -> None:
        allowed = self._reservation.resize_pools(min(max(nbytes, self._least), self.planned))
        if allowed and allowed != self.allowed:
            self.allowed = allowed
            self._experts.resize_to(allowed)
            self.wake()


def _watch(guard: weakref.ref[PoolGuard], closing: threading.Event) -> None:
    while not closing.wait(_EVERY_S):
        found = guard()
        if found is None:
            return
        found.check()
        del found
