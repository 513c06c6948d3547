"""One model of the server that may be loaded or not: its state, who uses it, and who waits for it."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import MLXInferError
from ...types import EngineStats

if TYPE_CHECKING:
    from ...config import EngineArgs
    from ...engine.async_llm import AsyncLLM
    from .model_card import Sheet

State = Literal["listed", "loading", "ready", "unloading", "failed"]
"""A model is listed until it is asked for. One that failed is tried again when it is asked for and its back-off is over."""

Open = Callable[["EngineArgs"], "AsyncLLM"]
"""Starts loading a model."""

FOR_EVER = math.inf
"""Seconds that a model stays loaded which nothing but another model's need makes room for."""
_FIRST_BACK_OFF_S = 5.0
_MOST_BACK_OFF_S = 300.0


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for a model."""

    ticket: int
    """Its place among all that wait, whichever model they wait for."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Ends when the model is there. Raises what it could not be loaded for."""


class Slot:
    """A model under one or several names. Belongs to the event loop; only `Keeper` changes it."""

    def __init__(self, args: EngineArgs | None, open_model: Open | None, *, keep_alive_s: float = FOR_EVER, pinned: bool = False) -> None:
        self.args = args
        """What to load; None for a model that was loaded by others, and is never unloaded."""
        self.open = open_model
        self.pinned = pinned
        """Whether it is never unloaded to make room, nor for being idle."""
        self.names: list[str] = []
        """Its public names, the first of them for messages."""
        self.watchers: set[Callable[[Slot], None]] = set()
        """Are called whenever its state has changed."""
        self._state: State = "listed"
        self.llm: AsyncLLM | None = None
        """Runs it, while the state is "ready"."""
        self.failure: MLXInferError | None = None
        """Why it failed the last time, in the state "failed"."""
        self.unreadable: MLXInferError | None = None
        """Why its files cannot be read, where somebody tried to tell what they are."""
        self.sheet: Sheet | None = None
        """What its files say, once they were read."""
        self.users = 0
        """Requests that use it or wait for it: it is not unloaded before there are none."""
        self.waiting: deque[Waiter] = deque()
        """Those that wait, first come first."""
        self.yields = False
        """Whether new requests wait, so that it becomes idle and makes room for a model that was asked for before them."""
        self.default_keep_alive_s = keep_alive_s
        self.keep_alive_s = keep_alive_s
        """Seconds after its last answer that it stays loaded, as the last request that said so wants."""
        self.idle_until = FOR_EVER
        """When it is unloaded, in seconds of `time.monotonic`, unless a request comes before."""
        self.timer: asyncio.TimerHandle | None = None
        self.used_at = 0.0
        """When a request last began or ended, in the same seconds."""
        self.ready_at = 0.0
        """When it was loaded."""
        self.loads = self.unloads = self.failures = 0
        """How often each happened, counts; for `/metrics`."""
        self.load_s = 0.0
        """Seconds that the last load took."""
        self.retry_at = 0.0
        """When it may be tried again."""
        self.past = EngineStats()
        """What its engines did that are closed."""
        self.model: weakref.ref[Any] | None = None
        """The graph with the weights: as long as it exists, their memory is not back."""
        self.died = False
        """Whether its engine failed for good, and it has not been loaded again."""
        self.deaths: list[float] = []
        """When its engine failed for good lately, in seconds of `time.monotonic`."""
        self._failed_in_a_row = 0

    @classmethod
    def running(cls, llm: AsyncLLM) -> Slot:
        """A slot with a model that was loaded by the caller, who also closes it."""
        slot = cls(None, None, pinned=True)
        slot.set_ready(llm)
        return slot

    @property
    def name(self) -> str:
        """A name for messages."""
        return self.names[0] if self.names else "the model"

    @property
    def state(self) -> State:
        """Where it is on its way from listed to ready and back."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        for watcher in tuple(self.watchers):
            watcher(self)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can ask for."""
        if self.llm is not None and not self.llm.ended:
            return self.llm.adapters
        return tuple(self.args.adapters or ()) if self.args else ()

    def keep_adapter(self, name: str, path: Path) -> None:
        """Load an adapter with the model from now on."""
        if self.args is not None:
            self.args = replace(self.args, adapters={**(self.args.adapters or {}), name: path})

    def drop_adapter(self, name: str) -> None:
        """Load it no longer."""
        if self.args is not None:
            self.args = replace(self.args, adapters={each: path for each, path in (self.args.adapters or {}).items() if each != name})

    @property
    def idle(self) -> bool:
        """Whether it is loaded and no request uses it. Those that wait while it yields do not."""
        return self.state == "ready" and self.users == len(self.waiting)

    @property
    def can_go(self) -> bool:
        """Whether it may be unloaded to make room, now or when its requests have ended."""
        return self.open is not None and not self.pinned and self.state == "ready"

    @property
    def broken(self) -> bool:
        """Whether it was loaded, and its engine has failed for good."""
        return self.died or (self.state == "ready" and self.llm is not None and self.llm.ended)

    @property
    def stats(self) -> EngineStats:
        """What all its engines did, and what there is now."""
        return self.past if self.llm is None else self.past + self.llm.stats()

    @property
    def planned(self) -> int:
        """Bytes that it may take; 0 where it is not loaded."""
        return 0 if self.llm is None or self.llm.ended else self.llm.memory_bytes

    @property
    def in_use(self) -> int:
        """Bytes that its weights and what is cached now take; 0 where it is not loaded."""
        return 0 if self.llm is None or self.llm.ended else self.llm.plan.in_use(self.llm.stats())

    def set_ready(self, llm: AsyncLLM) -> None:
        """It is loaded: all that wait may begin."""
        self.llm, self.failure, self.died = llm, None, False
        self.state = "ready"
        self.model = weakref.ref(llm.loaded.model)
        self.ready_at = self.used_at = time.monotonic()
        self._failed_in_a_row = 0
        self.admit()

    def set_failed(self, error: MLXInferError, back_off_s: float = 0.0) -> None:
        """It could not be loaded, or failed while it ran. The back-off doubles each time."""
        self.failure = error
        self.state = "failed"
        self.failures += 1
        back_off_s = max(back_off_s, min(_FIRST_BACK_OFF_S * 2**self._failed_in_a_row, _MOST_BACK_OFF_S))
        self._failed_in_a_row = min(self._failed_in_a_row + 1, 10)
        self.retry_at = time.monotonic() + back_off_s

    def admit(self) -> None:
        """Let all that wait begin."""
        self.yields = False
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done.done():
                waiter.done.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Tell all that wait that the model will not come."""
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done.done():
                waiter.done.set_exception(error)

    def stop_timer(self) -> None:
        """It is no longer unloaded for being idle."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.idle_until = None, FOR_EVER
