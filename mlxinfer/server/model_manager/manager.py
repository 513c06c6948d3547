"""Loads models on request, and unloads them when they are idle or when another model needs their memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import EngineError, MemoryPlanError, MLXInferError
from ...types import EngineStats
from ..errors import APIError, stopping
from ..log import notice
from .memory_room import MemoryRoom
from .model_card import ModelCard
from .model_slot import FOR_EVER, ModelSlot, Waiter
from .refusals import not_loaded, too_many_waiting

if TYPE_CHECKING:
    from ...engine.async_llm import AsyncLLM

MOST_WAITING = 256
"""Requests that may wait for one model."""
DWELL_S = 5.0
"""Seconds after a load in which the model keeps taking requests although another model waits for its memory. Without this time, two models
that get alternating requests would be loaded for every single request."""
_BROKEN_S = 60.0
"""Seconds before a model whose engine failed for good is loaded again, for the first failure within an hour."""
_REFUSED_S = 1.0
"""Seconds before the next attempt to reload a model, if the last attempt was refused without loading: the queue is full or the server
stops."""


_log = logging.getLogger("mlxinfer")


class ModelManager:
    """Decides which models are loaded. A server has one; all methods must be called on its event loop, therefore there are no locks.

    One task loads models one after another, ordered by their oldest waiting requests. If memory is short, idle models are unloaded,
    starting with the least recently used. If that is not enough, busy models drain: they take no new requests, finish the running ones and
    are unloaded. A model with running requests is never unloaded; neither is a model that was just loaded for waiting requests.
    """

    def __init__(
        self,
        slots: Iterable[ModelSlot],
        room: MemoryRoom,
        *,
        most_waiting: int = MOST_WAITING,
        dwell_s: float = DWELL_S,
        broken_s: float = _BROKEN_S,
    ) -> None:
        self.slots: Sequence[ModelSlot] = list(slots)
        self.room = room
        self._most_waiting = most_waiting
        self._dwell_s, self._broken_s = dwell_s, broken_s
        self._tickets = 0
        self._changed = asyncio.Event()
        self._loader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloads: set[asyncio.Task[None]] = set()
        self._closed = False
        self._prepares_structures = self._starting = False
        self._logged_swaps: set[frozenset[ModelSlot]] = set()
        """Pairs of models that do not fit together and of which the log says so."""
        self.on_ready: Callable[[ModelSlot], None] | None = None
        """Called after a model was loaded."""
        self.on_gone: Callable[[ModelSlot], None] | None = None
        """Called when a model starts to unload or its engine failed for good."""

    def try_acquire(self, slot: ModelSlot, keep_alive_s: float | None = None) -> bool:
        """Use a model if it is loaded and takes requests. After True the caller must call `release`."""
        if slot.state != "ready" or slot.draining or slot.waiting:
            return False
        if slot.llm is not None and slot.llm.ended and slot.open is not None:
            self.mark_failed(slot)
            return False
        self._use(slot, keep_alive_s)
        return True

    async def acquire(self, slot: ModelSlot, keep_alive_s: float | None = None) -> None:
        """Use a model, and load it first if necessary. The caller must call `release`, unless this raises `APIError` or is cancelled."""
        if self._closed:
            raise stopping()
        if self.try_acquire(slot, keep_alive_s):
            return
        if slot.retry_in_s > 0:
            raise not_loaded(slot)
        if len(slot.waiting) >= self._most_waiting:
            raise too_many_waiting(slot)
        self._tickets += 1
        waiter = Waiter(self._tickets)
        slot.waiting.append(waiter)
        self._use(slot, keep_alive_s)
        self._start_loader()
        try:
            await waiter.done
        except BaseException:
            if waiter in slot.waiting:
                slot.waiting.remove(waiter)
            self.release(slot)
            raise

    def release(self, slot: ModelSlot) -> None:
        """End the use of a model."""
        slot.users -= 1
        slot.used_at = time.monotonic()
        if slot.idle:
            self._start_timer(slot)
        self._changed.set()

    def start_loading(self, slot: ModelSlot) -> None:
        """Load a model without a request. Raises `APIError` during the back-off of a failed model."""
        if slot.retry_in_s > 0:
            raise not_loaded(slot)
        self._start(self._load_only(slot), self._tasks)

    def unload(self, slot: ModelSlot) -> None:
        """Unload a model as soon as it is idle. A failed model may be loaded again at once."""
        if slot.state == "failed":
            slot.state, slot.failure = "listed", None
        if slot.state in ("ready", "loading") or slot.users:
            slot.keep_alive_s = 0.0
        if slot.idle:
            self._start_timer(slot)

    async def card(self, slot: ModelSlot) -> ModelCard | None:
        """Facts about a model, loaded or not; None if its files cannot be read."""
        if slot.state == "ready" and slot.llm is not None and not slot.llm.ended:
            if slot.card is None or slot.card.summary is not slot.llm.loaded.summary:
                slot.card = await asyncio.to_thread(ModelCard.of, slot.llm)
        elif slot.card is None and slot.args is not None:
            try:
                slot.card, slot.unreadable = await asyncio.to_thread(ModelCard.read, slot.args), None
            except MLXInferError as error:
                error.__cause__ = error.__context__ = error.__traceback__ = None
                if str(slot.unreadable) != str(error):
                    notice(f"cannot be read: {error}", level=logging.ERROR, model=slot.name)
                slot.unreadable = error
        return slot.card

    async def start(self, slots: Iterable[ModelSlot]) -> list[ModelSlot]:
        """Load these models, as many as fit together. Returns the models that did not fit; they are loaded on request. Raises
        `MLXInferError` if a model cannot be loaded."""
        left_out = []
        self._starting = True
        for slot in slots:
            if any(other.state == "ready" for other in self.slots) and await asyncio.to_thread(self._need, slot) > self.room.left:
                left_out.append(slot)
                continue
            try:
                await self.acquire(slot)
            except APIError:
                raise (slot.failure and slot.failure.reason) or EngineError("the server is closed") from None
            self.release(slot)
        self._starting = False
        return left_out

    def prepare_structures(self) -> None:
        """Prepare the vocabularies of loaded models for structured answers, and of each model that is loaded later."""
        self._prepares_structures = True
        for slot in self.slots:
            if slot.state == "ready" and slot.llm is not None:
                slot.llm.prepare_structures()

    async def close(self) -> None:
        """Unload all models and refuse the waiting requests."""
        self._closed = True
        if self._loader is not None:
            self._loader.cancel()
            await asyncio.gather(self._loader, return_exceptions=True)
        for task in self._reloads:
            task.cancel()
        await asyncio.gather(*self._reloads, return_exceptions=True)
        for slot in self.slots:
            slot.stop_timer()
            slot.refuse(stopping())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self.slots:
            if slot.open is not None and slot.llm is not None:
                await self._unload(slot)
        self.room.close()

    def _use(self, slot: ModelSlot, keep_alive_s: float | None) -> None:
        slot.users += 1
        slot.used_at = time.monotonic()
        slot.stop_timer()
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s

    async def _load_only(self, slot: ModelSlot) -> None:
        try:
            await self.acquire(slot)
        except APIError as error:
            notice(error.message, level=logging.WARNING, model=slot.name)
        else:
            self.release(slot)

    def _start_timer(self, slot: ModelSlot) -> None:
        """Unload an idle model after its keep-alive."""
        slot.stop_timer()
        if slot.open is not None and not slot.pinned and slot.keep_alive_s != FOR_EVER:
            slot.timer = asyncio.get_running_loop().call_later(slot.keep_alive_s, self._expire, slot)

    def _expire(self, slot: ModelSlot) -> None:
        if slot.idle and not self._closed:
            self._start(self._unload(slot), self._tasks)

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _start_loader(self) -> None:
        """Have a task load the models that requests wait for."""
        self._changed.set()
        if not self._closed and (self._loader is None or self._loader.done()):
            self._loader = asyncio.ensure_future(self._load_waiting())
            self._loader.add_done_callback(self._loader_ended)

    async def _load_waiting(self) -> None:
        while (slot := self._next()) is not None:
            try:
                await self._load_if_possible(slot)
            except MLXInferError as error:
                self._fail(slot, error)
            except Exception as error:
                self._fail(slot, EngineError(f"a fault of the server: {type(error).__name__}"))
                raise

    def _loader_ended(self, loader: asyncio.Task[None]) -> None:
        """Log a fault of the server, and start a new task if requests wait for other models."""
        if not loader.cancelled() and (fault := loader.exception()) is not None:
            _log.error("a fault of the server while loading a model", exc_info=fault)
            if self._next() is not None:
                self._start_loader()

    def _next(self) -> ModelSlot | None:
        """The model with the oldest waiting request."""
        return min((slot for slot in self.slots if slot.waiting), key=lambda slot: slot.waiting[0].ticket, default=None)

    async def _load_if_possible(self, slot: ModelSlot) -> None:
        """Load a model if requests still wait for it and it is not in its back-off. Raises `MLXInferError`."""
        while slot.state == "unloading":
            await self._wait_for_change()
        if slot.state == "ready":
            slot.admit()
        elif slot.retry_in_s > 0:
            slot.refuse(not_loaded(slot))
        else:
            need = await asyncio.to_thread(self._need, slot)
            if await self._free_memory(slot, need):
                await self._load(slot, need)

    def _need(self, slot: ModelSlot) -> int:
        assert slot.args is not None
        return self.room.need(slot.args)

    async def _free_memory(self, slot: ModelSlot, need: int) -> bool:
        """Unload other models until `need` bytes are available. Returns False if no request waits for `slot` any more. Raises
        `MemoryPlanError` if unloading would not be enough."""
        try:
            while self.room.left < need:
                if not slot.waiting:
                    return False
                if await self._shrink_experts(need - self.room.left):
                    continue
                candidates = [other for other in self.slots if other.can_unload]
                unloading = any(other.state == "unloading" for other in self.slots)
                if not unloading and self.room.left + sum(other.planned for other in candidates) < need:
                    raise MemoryPlanError(self._too_large(need))
                idle = min((other for other in candidates if other.idle), key=lambda other: other.used_at, default=None)
                if idle is not None:
                    self._log_swap(idle, slot, need)
                    await self._unload(idle)
                else:
                    await self._wait_for_change(self._drain(need, candidates))
            return bool(slot.waiting)
        finally:
            for other in self.slots:
                if other.draining and other.state == "ready":
                    other.admit()

    async def _shrink_experts(self, nbytes: int) -> int:
        """Free up to `nbytes` of the pools of experts of loaded models. Returns the freed bytes."""
        freed = 0
        for other in self.slots:
            llm = other.llm
            if llm is not None and other.state == "ready" and not llm.ended and freed < nbytes and llm.spare_expert_bytes:
                with suppress(MLXInferError):  # its engine has ended
                    freed += await llm.shrink_experts(nbytes - freed)
        return freed

    def _log_swap(self, unloaded: ModelSlot, loaded: ModelSlot, need: int) -> None:
        """Log once that two models do not fit together: alternating requests load them again and again."""
        pair = frozenset((unloaded, loaded))
        if pair in self._logged_swaps:
            return
        self._logged_swaps.add(pair)
        sizes = f"{unloaded.planned / 1e9:.2f} + {need / 1e9:.2f} of {self.room.limit / 1e9:.2f} GB"
        notice(
            f"unloads {unloaded.name}: they do not fit together ({sizes}), so every change between them loads one again; named on the "
            "command line they divide the memory, and a smaller --max-context plans less",
            model=loaded.name,
        )

    def _drain(self, need: int, candidates: Iterable[ModelSlot]) -> float | None:
        """Drain busy models until their memory would be enough, the least recently used first. Returns the seconds after which a further
        model may be drained; None if there is nothing to wait for but running requests."""
        short, again, now = need - self.room.left, None, time.monotonic()
        for other in sorted(candidates, key=lambda other: (not other.draining, other.used_at)):
            if short <= 0:
                break
            short -= other.planned
            rest = other.ready_at + self._dwell_s - now
            if rest <= 0:
                other.draining = True
            elif again is None or rest < again:
                again = rest
        return again

    async def _wait_for_change(self, timeout_s: float | None = None) -> None:
        """Wait until a request or an unloading ends."""
        self._changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _too_large(self, need: int) -> str:
        pinned = ", ".join(other.name for other in self.slots if other.pinned and other.state == "ready" and other.open)
        beside = f" next to {pinned}" if pinned else ""
        return f"it needs {need / 1e9:.3g} GB, and models may take {self.room.limit / 1e9:.3g} GB together{beside}"

    async def _load(self, slot: ModelSlot, need: int) -> None:
        assert slot.args is not None
        assert slot.open is not None
        slot.state, began = "loading", time.monotonic()
        llm = slot.open(self.room.grant(slot.args, need, (other for other in self.slots if other is not slot)))
        try:
            await llm.ready()
        except BaseException:
            slot.state = "listed"
            await llm.close()
            raise
        slot.loads += 1
        slot.load_s = time.monotonic() - began
        slot.set_ready(llm)
        self._start(self.reload(slot, llm.end, slot.loads), self._reloads)
        if self.on_ready:
            self.on_ready(slot)
        if slot.idle:  # all waiting requests have been cancelled
            self._start_timer(slot)
        for note in llm.notes:
            notice(note, model=slot.name)
        notice("loaded", model=slot.name, seconds=round(slot.load_s, 3), bytes=slot.in_use, limit_bytes=slot.planned)
        if self._prepares_structures and slot.keep_alive_s > 0:
            llm.prepare_structures()

    async def reload(self, slot: ModelSlot, ended: Future[None], loads: int) -> None:
        """Wait for the end of the engine of load number `loads`. If the engine failed for good, load the model again after each back-off
        until a load succeeds: a router that watches `/health` then finds the server healthy again.

        Returns early if a request has loaded the model, or if it was unloaded on purpose.
        """
        await asyncio.wait([asyncio.wrap_future(ended)])
        if slot.state == "ready" and slot.loads == loads:
            self.mark_failed(slot)
        while slot.broken and slot.state == "failed" and slot.loads == loads:
            if (wait_s := slot.retry_in_s) > 0:
                await asyncio.sleep(wait_s)
                continue
            try:
                await self.acquire(slot)
            except APIError as error:
                notice(error.message, level=logging.WARNING, model=slot.name)
                if slot.retry_in_s == 0:
                    await asyncio.sleep(_REFUSED_S)
            else:
                self.release(slot)

    def _unload(self, slot: ModelSlot) -> Coroutine[Any, Any, None]:
        """Take the model away from new requests at once. The returned coroutine waits until its memory is free."""
        llm, slot.llm = slot.llm, None
        slot.state = "unloading"
        assert llm is not None
        self._forget(slot, llm)
        slot.keep_alive_s = slot.default_keep_alive_s
        return self._close(slot, llm)

    def _forget(self, slot: ModelSlot, llm: AsyncLLM) -> None:
        """Add the counts of an engine to the slot's past, and report that the model is gone."""
        slot.stop_timer()
        slot.past = slot.past + llm.stats() + EngineStats()
        if self.on_gone:
            self.on_gone(slot)

    async def _close(self, slot: ModelSlot, llm: AsyncLLM) -> None:
        await llm.close()
        del llm
        await self.room.wait_until_freed(slot)
        slot.state = "listed"
        slot.unloads += 1
        notice("unloaded", model=slot.name)
        self._changed.set()

    def _fail(self, slot: ModelSlot, error: MLXInferError, *, died: bool = False) -> None:
        error.__cause__ = error.__context__ = error.__traceback__ = None  # these refer to weights of the model
        slot.set_failed(error, died=died, first_death_s=self._broken_s)
        slot.keep_alive_s = slot.default_keep_alive_s
        if not self._starting:  # at the start the command itself reports the error
            notice(f"could not be loaded: {error}", level=logging.ERROR, model=slot.name)
        slot.refuse(not_loaded(slot))

    def mark_failed(self, slot: ModelSlot) -> None:
        """Record that the engine of a loaded model has failed for good; `reload` loads the model again after a back-off."""
        llm = slot.llm
        assert llm is not None
        try:
            reason = EngineError(f"its engine has ended: {llm.name}")
        except MLXInferError as error:
            reason = EngineError(str(error))
        slot.llm = None
        self._forget(slot, llm)
        self._fail(slot, reason, died=True)
