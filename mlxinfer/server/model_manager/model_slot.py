"""One model of the server, loaded or not: its state, its requests and its failures."""

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
    from .model_card import ModelCard

State = Literal["listed", "loading", "ready", "unloading", "failed"]
"""A model is "listed" until a request asks for it. A "failed" model is loaded again on the first request after its back-off."""

ModelOpener = Callable[["EngineArgs"], "AsyncLLM"]
"""Starts loading a model."""

FOR_EVER = math.inf
"""A keep-alive in seconds: the model is unloaded only if another model needs its memory."""
_FIRST_BACK_OFF_S, _MOST_BACK_OFF_S = 5.0, 300.0
_DEATHS_WITHIN_S, MOST_DEATH_BACK_OFF_S = 3600.0, 1800.0


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits until a model is loaded."""

    ticket: int
    """Order of arrival over the requests for all models."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the model is loaded; raises the error if loading fails."""


@dataclass(slots=True)
class Failure:
    """The last failure of a model that has not been loaded since."""

    reason: MLXInferError
    retry_at: float
    """Time on the clock `time.monotonic` before which the model is not loaded again."""
    count: int = 1
    """Failures since the model was last loaded."""
    died: bool = False
    """True if the model was loaded and its engine failed for good."""


class ModelSlot:
    """A model under one or several names. Belongs to the event loop; only `ModelManager` changes it."""

    def __init__(
        self, args: EngineArgs | None, open_model: ModelOpener | None, *, keep_alive_s: float = FOR_EVER, pinned: bool = False
    ) -> None:
        """`args` and `open_model` are None for a model that the caller has loaded: the server never unloads it."""
        self.args = args
        self.open = open_model
        self.pinned = pinned
        """True if the model is unloaded neither when idle nor for another model."""
        self.names: list[str] = []
        """Public names; messages use the first."""
        self.watchers: set[Callable[[ModelSlot], None]] = set()
        """Called after every change of `state`."""
        self._state: State = "listed"
        self.llm: AsyncLLM | None = None
        """The engine; None unless the state is "ready"."""
        self.failure: Failure | None = None
        self.deaths: list[float] = []
        """Recent times on the clock `time.monotonic` at which an engine of this model failed for good."""
        self.card: ModelCard | None = None
        """Facts from the model's files, once they have been read."""
        self.unreadable: MLXInferError | None = None
        """The error of the last attempt to read `card`."""
        self.users = 0
        """Requests that use the model or wait for it. The model is not unloaded before this is 0."""
        self.waiting: deque[Waiter] = deque()
        """Waiting requests, oldest first."""
        self.draining = False
        """True if new requests wait, until the model is idle and another model gets its memory."""
        self.default_keep_alive_s = keep_alive_s
        self.keep_alive_s = keep_alive_s
        """Seconds without requests before the model is unloaded; the last request that names a value sets it."""
        self.timer: asyncio.TimerHandle | None = None
        """Unloads the idle model."""
        self.used_at = 0.0
        """Time on the clock `time.monotonic` at which a request last started or ended."""
        self.ready_at = 0.0
        """Time on the same clock at which the model was loaded."""
        self.loads = self.unloads = self.failures = 0
        self.load_s = 0.0
        """Seconds of the last load."""
        self.past = EngineStats()
        """Counts of closed engines."""
        self.model: weakref.ref[Any] | None = None
        """The graph with the weights. The memory is not free while the graph exists."""

    @classmethod
    def running(cls, llm: AsyncLLM) -> ModelSlot:
        """A slot for a model that the caller has loaded and will close."""
        slot = cls(None, None, pinned=True)
        slot.set_ready(llm)
        return slot

    @property
    def name(self) -> str:
        """A name for messages."""
        return self.names[0] if self.names else "the model"

    @property
    def state(self) -> State:
        """The current state; setting it calls all `watchers`."""
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

    def add_adapter(self, name: str, path: Path) -> None:
        """Load an adapter together with the model from the next load on."""
        if self.args is not None:
            self.args = replace(self.args, adapters={**(self.args.adapters or {}), name: path})

    def remove_adapter(self, name: str) -> None:
        """Do not load this adapter in later loads."""
        if self.args is not None:
            self.args = replace(self.args, adapters={each: path for each, path in (self.args.adapters or {}).items() if each != name})

    @property
    def idle(self) -> bool:
        """True if the model is loaded and no request uses it. Requests that wait while the model drains do not count."""
        return self.state == "ready" and self.users == len(self.waiting)

    @property
    def idle_until(self) -> float:
        """Time on the clock `time.monotonic` at which the idle model is unloaded."""
        return FOR_EVER if self.timer is None else self.timer.when()

    @property
    def can_unload(self) -> bool:
        """True if the model may be unloaded for another model, now or after its requests have ended."""
        return self.open is not None and not self.pinned and self.state == "ready"

    @property
    def broken(self) -> bool:
        """True if the model was loaded, its engine has failed for good, and the model has not been loaded again."""
        died = self.failure is not None and self.failure.died
        return died or (self.state == "ready" and self.llm is not None and self.llm.ended)

    @property
    def retry_in_s(self) -> float:
        """Seconds before a failed model may be loaded again; 0 for a model that may be loaded now."""
        return 0.0 if self.failure is None or self.state != "failed" else max(self.failure.retry_at - time.monotonic(), 0.0)

    @property
    def stats(self) -> EngineStats:
        """Counts of all engines of this model, and the current state of the running engine."""
        return self.past if self.llm is None else self.past + self.llm.stats()

    @property
    def planned(self) -> int:
        """Bytes that the loaded model may use; 0 if the model is not loaded."""
        return 0 if self.llm is None or self.llm.ended else self.llm.memory_bytes

    @property
    def in_use(self) -> int:
        """Bytes of the weights and the current cache; 0 if the model is not loaded."""
        return 0 if self.llm is None or self.llm.ended else self.llm.plan.in_use(self.llm.stats())

    def set_ready(self, llm: AsyncLLM) -> None:
        """Record a successful load and let all waiting requests start."""
        self.llm, self.failure = llm, None
        self.state = "ready"
        self.model = weakref.ref(llm.loaded.model)
        self.ready_at = self.used_at = time.monotonic()
        self.admit()

    def set_failed(self, reason: MLXInferError, *, died: bool = False, first_death_s: float = 0.0) -> None:
        """Record a failed load or, if `died`, an engine that failed for good.

        The back-off after failed loads starts at 5 seconds, doubles up to 300, and ends with a successful load. The back-off after deaths
        starts at `first_death_s`, doubles with each further death within an hour, and is 30 minutes at most. The longer one counts.
        """
        last, now = self.failure, time.monotonic()
        count = 1 if last is None else last.count + 1
        wait_s = min(_FIRST_BACK_OFF_S * 2 ** min(count - 1, 10), _MOST_BACK_OFF_S)
        if died:
            self.deaths.append(now)
            wait_s = max(wait_s, death_back_off_s(self.deaths, now, first_death_s))
        self.failure = Failure(reason, now + wait_s, count, died or (last is not None and last.died))
        self.failures += 1
        self.state = "failed"

    def admit(self) -> None:
        """Let all waiting requests start."""
        self.draining = False
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done.done():
                waiter.done.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Raise `error` in all waiting requests."""
        while self.waiting:
            waiter = self.waiting.popleft()
            if not waiter.done.done():
                waiter.done.set_exception(error)

    def stop_timer(self) -> None:
        """Cancel the unloading of an idle model."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None


def death_back_off_s(deaths: list[float], now: float, first_s: float) -> float:
    """Seconds to wait after the last of these `deaths` (times on the clock of `now`): `first_s`, doubled for each earlier death within the
    hour. Removes older deaths from the list."""
    deaths[:] = [at for at in deaths if now - at < _DEATHS_WITHIN_S]
    return min(first_s * 2.0 ** max(len(deaths) - 1, 0), MOST_DEATH_BACK_OFF_S)
