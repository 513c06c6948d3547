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

    def __init__(self, experts: PooledExperts, reservation: Reservation, look: Callable[[int], Pressure] | None = None) -> None:
        """`look` replaces `memory_pressure` of this machine: it takes the bytes that should stay free. `start` begins to watch."""
        pools = reservation.plan.experts
        assert pools is not None
        self._experts, self._reservation, self._look = experts, reservation, look or _pressure_here
        self.planned = pools.pools
        """Bytes of the pools when the model was loaded, which they never exceed."""
        self.allowed = pools.pools
        """Present bytes of the pools."""
        self._asked = pools.pools
        """Bytes that the engine was asked for."""
        self._least = pools.least
        self._largest = max(layer.slots * layer.record_bytes for layer in pools.layers)
        """Bytes of the largest pool, which exists twice while it is resized."""
        self._calm = 0
        self._lock = threading.RLock()
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
        pressure = self._look(self._largest)
        with self._lock:
            if pressure.short:
                self._calm = 0
                if self._asked >= self.allowed:  # otherwise the engine has not shrunk the pools yet
                    self._ask_for(self.allowed - pressure.short)
                return
            self._calm += 1
            if self._calm >= _CALM_LOOKS and self._asked < self.planned:
                self._calm = 0
                self._ask_for(self._asked + min(int(pressure.spare * _SPARE_SHARE), int(self.planned * _GROWTH)))

    def give(self, nbytes: int) -> None:
        """Ask the engine to give up to `nbytes` of the pools to another model. They are free when `allowed` has changed.

        The pools grow again as memory allows, when the other model is gone.
        """
        with self._lock:
            self._calm = 0
            self._ask_for(self._asked - nbytes)

    @property
    def can_give(self) -> int:
        """Bytes of the pools beyond their minimum."""
        return max(self.allowed - self._least, 0)

    def _ask_for(self, nbytes: int) -> None:
        wanted = min(max(nbytes, self._least), self.planned)
        if wanted != self._asked:
            self._asked = wanted
            self._experts.resize_by(self._decide)
            self.wake()

    def _decide(self) -> int:
        """Return the bytes of the pools. The engine calls this between two steps, and resizes the pools at once."""
        with self._lock:
            self.allowed = self._asked = self._reservation.resize_pools(self._asked) or self.allowed
            return self.allowed


def _pressure_here(margin: int) -> Pressure:
    return memory_pressure(memory_limit()[0], margin)


def _watch(guard: weakref.ref[PoolGuard], closing: threading.Event) -> None:
    while not closing.wait(_EVERY_S):
        found = guard()
        if found is None:
            return
        found.check()
        del found
