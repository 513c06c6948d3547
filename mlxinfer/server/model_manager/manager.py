"""Loads models when they are asked for, and unloads them when they are idle or others need the room."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import EngineError, MemoryPlanError, MLXInferError
from ...types import EngineStats
from ..errors import APIError, stopping
from ..log import notice
from .memory_room import Room
from .model_card import Sheet
from .model_slot import FOR_EVER, Slot, Waiter
from .refusals import not_loaded, too_many_waiting
from .revival import back_off_s, revive

if TYPE_CHECKING:
    from ...engine.async_llm import AsyncLLM

MOST_WAITING = 256
"""Requests that may wait for one model to be loaded."""
DWELL_S = 5.0
"""Seconds that a model which was just loaded goes on taking requests, although another model waits for its room: otherwise two models that
are asked for in turns would be loaded for every single request."""
_BROKEN_S = 60.0
"""Seconds before an engine that failed for good is loaded again, the first time within an hour."""


_log = logging.getLogger("mlxinfer")


class Keeper:
    """Decides which models are loaded. One for each server; all methods are for its event loop, which is why there are no locks.

    One task loads models one after another, in the order in which their oldest waiting requests came. Where there is no room, idle models
    go, the least recently used first. If that is not enough, busy ones stop taking new requests, end those they have, and go then: a model
    with requests, or loaded for requests that wait, is never unloaded.
    """

    def __init__(
        self, slots: Iterable[Slot], room: Room, *, most_waiting: int = MOST_WAITING, dwell_s: float = DWELL_S, broken_s: float = _BROKEN_S
    ) -> None:
        self.slots: Sequence[Slot] = list(slots)
        self.room = room
        self._most_waiting = most_waiting
        self._dwell_s, self._broken_s = dwell_s, broken_s
        self._tickets = 0
        self._changed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._revivals: set[asyncio.Task[None]] = set()
        self._closed = False
        self._prepares = self._starting = False
        self._told: set[frozenset[Slot]] = set()
        """Pairs of models of which the log says that they do not fit together."""
        self.on_ready: Callable[[Slot], None] | None = None
        """Called when a model was loaded."""
        self.on_gone: Callable[[Slot], None] | None = None
        """Called when it is not there any more."""

    def try_hold(self, slot: Slot, keep_alive_s: float | None = None) -> bool:
        """Use a model, if it is loaded and takes requests. `let_go` must follow where this returns True."""
        if slot.state != "ready" or slot.yields or slot.waiting:
            return False
        if slot.llm is not None and slot.llm.ended and slot.open is not None:
            self.bury(slot)
            return False
        self._use(slot, keep_alive_s)
        return True

    async def hold(self, slot: Slot, keep_alive_s: float | None = None) -> None:
        """Use a model, after loading it if need be. `let_go` must follow, unless this raises `APIError` or is cancelled."""
        if self._closed:
            raise stopping()
        if self.try_hold(slot, keep_alive_s):
            return
        if slot.state == "failed" and slot.retry_at > time.monotonic():
            raise not_loaded(slot)
        if len(slot.waiting) >= self._most_waiting:
            raise too_many_waiting(slot)
        self._tickets += 1
        waiter = Waiter(self._tickets)
        slot.waiting.append(waiter)
        self._use(slot, keep_alive_s)
        self._wake()
        try:
            await waiter.done
        except BaseException:
            if waiter in slot.waiting:
                slot.waiting.remove(waiter)
            self.let_go(slot)
            raise

    def let_go(self, slot: Slot) -> None:
        """A request has ended, or waits no longer."""
        slot.users -= 1
        slot.used_at = time.monotonic()
        if slot.idle:
            self._start_timer(slot)
        self._changed.set()

    def start_loading(self, slot: Slot) -> None:
        """Load a model without a request. Raises `APIError` where that failed a short while ago."""
        if slot.state == "failed" and slot.retry_at > time.monotonic():
            raise not_loaded(slot)
        self._start(self._load_only(slot))

    def unload(self, slot: Slot) -> None:
        """Unload a model as soon as it is idle. One that failed may be tried again at once."""
        if slot.state == "failed":
            slot.state, slot.failure, slot.retry_at, slot.died = "listed", None, 0.0, False
        if slot.state in ("ready", "loading") or slot.users:
            slot.keep_alive_s = 0.0
        if slot.idle:
            self._start_timer(slot)

    async def sheet(self, slot: Slot) -> Sheet | None:
        """What is told of a model, loaded or not; None where its files cannot be read."""
        if slot.state == "ready" and slot.llm is not None and not slot.llm.ended:
            if slot.sheet is None or slot.sheet.summary is not slot.llm.loaded.summary:
                slot.sheet = await asyncio.to_thread(Sheet.of, slot.llm)
        elif slot.sheet is None and slot.args is not None:
            try:
                slot.sheet, slot.unreadable = await asyncio.to_thread(Sheet.read, slot.args), None
            except MLXInferError as error:
                error.__cause__ = error.__context__ = error.__traceback__ = None
                if str(slot.unreadable) != str(error):
                    notice(f"cannot be read: {error}", level=logging.ERROR, model=slot.name)
                slot.unreadable = error
        return slot.sheet

    async def start(self, slots: Iterable[Slot]) -> list[Slot]:
        """Load these, as many as fit together. Returns those that did not fit, which wait until they are asked for. Raises the
        `MLXInferError` that the first could not be loaded for."""
        left_out = []
        self._starting = True
        for slot in slots:
            if any(other.state == "ready" for other in self.slots) and await asyncio.to_thread(self._need, slot) > self.room.left:
                left_out.append(slot)
                continue
            try:
                await self.hold(slot)
            except APIError:
                raise slot.failure or EngineError("the server is closed") from None
            self.let_go(slot)
        self._starting = False
        return left_out

    def prepare_structures(self) -> None:
        """Prepare the vocabularies of loaded models for structured answers, and from now on those of further ones as they are loaded."""
        self._prepares = True
        for slot in self.slots:
            if slot.state == "ready" and slot.llm is not None:
                slot.llm.prepare_structures()

    async def close(self) -> None:
        """Unload all. Requests that wait are refused."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for task in self._revivals:
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        for slot in self.slots:
            slot.stop_timer()
            slot.refuse(stopping())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self.slots:
            if slot.open is not None and slot.llm is not None:
                await self._unload(slot)
        self.room.close()

    def _use(self, slot: Slot, keep_alive_s: float | None) -> None:
        slot.users += 1
        slot.used_at = time.monotonic()
        slot.stop_timer()
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s

    async def _load_only(self, slot: Slot) -> None:
        try:
            await self.hold(slot)
        except APIError as error:
            notice(error.message, level=logging.WARNING, model=slot.name)
        else:
            self.let_go(slot)

    def _start_timer(self, slot: Slot) -> None:
        """Unload a model that is idle when its time is over."""
        slot.stop_timer()
        if slot.open is None or slot.pinned or slot.keep_alive_s == FOR_EVER:
            return
        slot.idle_until = time.monotonic() + slot.keep_alive_s
        slot.timer = asyncio.get_running_loop().call_later(slot.keep_alive_s, self._expire, slot)

    def _expire(self, slot: Slot) -> None:
        if slot.idle and not self._closed:
            self._start(self._unload(slot))

    def _start(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]] | None = None) -> None:
        tasks, task = self._tasks if among is None else among, asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _wake(self) -> None:
        """Have the models loaded that requests wait for."""
        self._changed.set()
        if not self._closed and (self._worker is None or self._worker.done()):
            self._worker = asyncio.ensure_future(self._work())
            self._worker.add_done_callback(self._worked)

    async def _work(self) -> None:
        while (slot := self._next()) is not None:
            try:
                await self._bring(slot)
            except MLXInferError as error:
                self._fail(slot, error)
            except Exception as error:
                self._fail(slot, EngineError(f"a fault of the server: {type(error).__name__}"))
                raise

    def _worked(self, worker: asyncio.Task[None]) -> None:
        """After a fault of the server, those who wait for other models still get theirs."""
        if not worker.cancelled() and (fault := worker.exception()) is not None:
            _log.error("a fault of the server while a model was loaded", exc_info=fault)
            if self._next() is not None:
                self._wake()

    def _next(self) -> Slot | None:
        """The model that has been waited for longest."""
        return min((slot for slot in self.slots if slot.waiting), key=lambda slot: slot.waiting[0].ticket, default=None)

    async def _bring(self, slot: Slot) -> None:
        """Load a model, or do nothing where nobody waits for it any more. Raises the `MLXInferError` that it cannot be loaded for."""
        while slot.state == "unloading":
            await self._change()
        if slot.state == "ready":
            slot.admit()
        elif slot.state == "failed" and slot.retry_at > time.monotonic():
            slot.refuse(not_loaded(slot))
        else:
            need = await asyncio.to_thread(self._need, slot)
            if await self._make_room(slot, need):
                await self._load(slot, need)

    def _need(self, slot: Slot) -> int:
        assert slot.args is not None
        return self.room.need(slot.args)

    async def _make_room(self, slot: Slot, need: int) -> bool:
        """Unload others until there is room. Returns False if nobody waits for it any more, and raises `MemoryPlanError` where there
        cannot be room."""
        try:
            while self.room.left < need:
                if not slot.waiting:
                    return False
                going = [other for other in self.slots if other.can_go]
                leaving = any(other.state == "unloading" for other in self.slots)
                if not leaving and self.room.left + sum(other.planned for other in going) < need:
                    raise MemoryPlanError(self._too_large(need))
                idle = min((other for other in going if other.idle), key=lambda other: other.used_at, default=None)
                if idle is not None:
                    self._tell_of_swap(idle, slot, need)
                    await self._unload(idle)
                else:
                    await self._change(self._ask_for_room(need, going))
            return bool(slot.waiting)
        finally:
            for other in self.slots:
                if other.yields and other.state == "ready":
                    other.admit()

    def _tell_of_swap(self, going: Slot, coming: Slot, need: int) -> None:
        """Say once that two models do not fit together, because each request for the other one then loads it again."""
        pair = frozenset((going, coming))
        if pair in self._told:
            return
        self._told.add(pair)
        room = f"{going.planned / 1e9:.2f} + {need / 1e9:.2f} of {self.room.limit / 1e9:.2f} GB"
        notice(
            f"unloads {going.name}: they do not fit together ({room}), so every change between them loads one again; named on the command "
            "line they divide the memory, and a smaller --max-context plans less",
            model=coming.name,
        )

    def _ask_for_room(self, need: int, going: Iterable[Slot]) -> float | None:
        """Let as many busy models take no more requests as it takes, the least recently used first. Returns the seconds after which it is
        worth to ask again; None where a change will tell."""
        short, again, now = need - self.room.left, None, time.monotonic()
        for other in sorted(going, key=lambda other: (not other.yields, other.used_at)):
            if short <= 0:
                break
            short -= other.planned
            rest = other.ready_at + self._dwell_s - now
            if rest <= 0:
                other.yields = True
            elif again is None or rest < again:
                again = rest
        return again

    async def _change(self, timeout_s: float | None = None) -> None:
        """Wait until a request or an unloading has ended."""
        self._changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _too_large(self, need: int) -> str:
        pinned = ", ".join(other.name for other in self.slots if other.pinned and other.state == "ready" and other.open)
        beside = f" next to {pinned}" if pinned else ""
        return f"it needs {need / 1e9:.3g} GB, and models may take {self.room.limit / 1e9:.3g} GB together{beside}"

    async def _load(self, slot: Slot, need: int) -> None:
        assert slot.args is not None
        assert slot.open is not None
        slot.state, began = "loading", time.monotonic()
        llm = slot.open(self.room.given(slot.args, need, (other for other in self.slots if other is not slot)))
        try:
            await llm.ready()
        except BaseException:
            slot.state = "listed"
            await llm.close()
            raise
        slot.loads += 1
        slot.load_s = time.monotonic() - began
        slot.set_ready(llm)
        self._start(revive(self, slot, llm.end, slot.loads), self._revivals)
        if self.on_ready:
            self.on_ready(slot)
        if slot.idle:  # everybody has left
            self._start_timer(slot)
        for note in llm.notes:
            notice(note, model=slot.name)
        notice("loaded", model=slot.name, seconds=round(slot.load_s, 3), bytes=slot.in_use, limit_bytes=slot.planned)
        if self._prepares and slot.keep_alive_s > 0:
            llm.prepare_structures()

    def _unload(self, slot: Slot) -> Coroutine[Any, Any, None]:
        """From now on nobody can use it; what is returned waits until its memory is back."""
        llm, slot.llm = slot.llm, None
        slot.state = "unloading"
        assert llm is not None
        slot.stop_timer()
        slot.past = slot.past + llm.stats() + EngineStats()
        slot.keep_alive_s = slot.default_keep_alive_s
        if self.on_gone:
            self.on_gone(slot)
        return self._close(slot, llm)

    async def _close(self, slot: Slot, llm: AsyncLLM) -> None:
        await llm.close()
        del llm
        await self.room.returned(slot)
        slot.state = "listed"
        slot.unloads += 1
        notice("unloaded", model=slot.name)
        self._changed.set()

    def _fail(self, slot: Slot, error: MLXInferError, back_off_s: float = 0.0) -> None:
        error.__cause__ = error.__context__ = error.__traceback__ = None  # they refer to what was read of the model
        slot.set_failed(error, back_off_s)
        slot.keep_alive_s = slot.default_keep_alive_s
        if not self._starting:  # then the command says so, and ends
            notice(f"could not be loaded: {error}", level=logging.ERROR, model=slot.name)
        slot.refuse(not_loaded(slot))

    def bury(self, slot: Slot) -> None:
        """The engine of a loaded model has failed for good. It is loaded again after a while."""
        llm = slot.llm
        assert llm is not None
        slot.stop_timer()
        slot.past = slot.past + llm.stats() + EngineStats()
        try:
            reason = EngineError(f"its engine has ended: {llm.name}")
        except MLXInferError as error:
            reason = EngineError(str(error))
        slot.llm, slot.died = None, True
        if self.on_gone:
            self.on_gone(slot)
        slot.deaths.append(now := time.monotonic())
        self._fail(slot, reason, back_off_s(slot.deaths, now, self._broken_s))
