"""The server process: opens sockets, loads models, runs uvicorn, and stops on signals."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import uvicorn

from ..cache.kv_events import AllBlocksCleared
from ..errors import ServerError
from ..util.installing import install_line
from .access.connection import connection_class
from .access.open_files import with_files
from .access.own_names import addresses_for_others
from .access.sockets import BACKLOG, Listeners, address, listening
from .app import create_app
from .log import notice, start_logging
from .model_manager.manager import ModelManager
from .model_manager.memory_room import MemoryRoom
from .model_manager.model_slot import ModelSlot
from .model_manager.registry import Registry
from .settings import ServerSettings

if TYPE_CHECKING:
    from .routers.kv_events import KVEventPublisher

_LAST_WORDS_S = 2.0
"""Seconds after the second signal in which clients can read that their answers were stopped."""
_ACCEPTED_AT_ONCE = 64
"""Connections that the event loop accepts at once, before it closes those above the limit. Each is an open file. If the system allows no
more files, asyncio retries as many times as this number, and logs a traceback each time."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HTTPServer(uvicorn.Server):
    """Uvicorn with this server's application and limits. Calls `ready()` once it listens."""

    def __init__(
        self, models: Registry, manager: ModelManager, settings: ServerSettings, *, ready: Callable[[], None] = lambda: None
    ) -> None:
        limits, self._drain_s, self._draining = settings.limits, settings.drain_s, threading.Event()
        config = uvicorn.Config(
            create_app(models, manager, settings, draining=self._draining),
            http=connection_class(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=ceil(limits.header_s),
            h11_max_incomplete_event_size=limits.header_bytes,
            backlog=min(_ACCEPTED_AT_ONCE, limits.connections),
        )
        super().__init__(config)
        self._ready = ready
        self._opens_page = settings.opens_page

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():  # asyncio has set the backlog to `_ACCEPTED_AT_ONCE`
            listener.listen(BACKLOG)
        self._ready()
        if self._opens_page:
            open_page(sockets or ())

    def end(self) -> None:
        """Stop the server. The first call closes the listeners after `drain_s` seconds and lets running requests finish; the second call
        cancels them."""
        if self._drain_s and not self._draining.is_set():
            self._draining.set()
            asyncio.get_running_loop().call_later(self._drain_s, self._close_listeners)
            return
        self.force_exit = self.should_exit
        self.should_exit = True

    def _close_listeners(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `run`: the server may be one part of a process."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._draining.set()
        for listener in self.servers:
            listener.close()
        if isinstance(sockets, Listeners):
            sockets.leave()  # a successor may start while this server sends its last answers
        await super().shutdown(sockets)
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        _, deaf = await asyncio.wait(tasks, timeout=_LAST_WORDS_S) if tasks else ((), ())
        if deaf:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.gather(*deaf, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModels:
    """The models of a server."""

    registry: Registry
    at_start: Sequence[ModelSlot] = ()
    """Models that are loaded before the first request."""
    memory: int | None = None
    """Bytes for all models together; None allows all memory of the device."""
    notes: Sequence[str] = ()
    """Notices for the log at the start."""


def run(models: ServerModels, settings: ServerSettings, *, tell: Callable[[str], Any] = print, sockets: Listeners | None = None) -> None:
    """Load models and serve them until SIGINT or SIGTERM.

    `tell` gets one line with the addresses. `sockets` are listeners that the caller has opened for these settings. By default the
    sockets are opened here, before the models load: clients that connect meanwhile wait instead of failing. Raises `MLXInferError`.
    """
    start_logging(log_format=settings.log_format)
    for note in models.notes:
        notice(note)
    # A parent process may have blocked these signals (Foundation does on Linux), and children inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    settings = with_files(settings)
    with listening(settings) if sockets is None else nullcontext(sockets) as listeners:
        asyncio.run(_run(models, settings, listeners, tell))


async def _run(models: ServerModels, settings: ServerSettings, sockets: Listeners, tell: Callable[[str], Any]) -> None:
    stop = asyncio.Event()
    server: HTTPServer | None = None

    def on_signal() -> None:
        stop.set()
        if server is not None:
            server.end()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    manager = ModelManager(models.registry.slots, MemoryRoom(models.memory))
    publisher = _publisher(settings, manager)
    try:
        loading = asyncio.ensure_future(manager.start(models.at_start))
        if not await _unless(stop, loading):
            return
        for slot in loading.result():
            notice("there is no room for it next to the others: it is loaded when it is asked for", model=slot.name)

        def ready() -> None:
            names = ", ".join(entry.name for entry in models.registry)
            others = " or ".join(addresses_for_others(sockets, settings))
            tell(f"ready on {' and '.join(map(address, sockets))} ({names}){others and f'; on a phone or another machine: {others}'}")
            manager.prepare_structures()

        server = HTTPServer(models.registry, manager, settings, ready=ready)
        await server.serve(sockets)
    finally:
        await manager.close()
        if publisher is not None:
            publisher.close()


def _publisher(settings: ServerSettings, manager: ModelManager) -> KVEventPublisher | None:
    """Publish the contents of all prefix caches, if the settings name an endpoint. Raises `ServerError`."""
    if settings.kv_events is None:
        return None
    try:
        from .routers.kv_events import KVEventPublisher
    except ImportError as error:
        raise ServerError(f"KV events need {error.name}: {install_line('pyzmq msgspec')}") from None
    publisher = KVEventPublisher(settings.kv_events, settings.kv_events_replay)

    def begin(slot: ModelSlot) -> None:
        if slot.llm is not None:
            slot.llm.send_kv_events(partial(publisher.put, slot.name))

    manager.on_ready = begin
    manager.on_gone = lambda slot: publisher.put(slot.name, AllBlocksCleared())
    return publisher


def open_page(listeners: Sequence[socket.socket], open_url: Callable[[str], bool] | None = None) -> threading.Thread:
    """Open the page of the server that listens here, with `open_url` or in the user's browser. Runs in a thread, because starting a browser
    may block. If no browser can be opened, the log gives the address."""
    url = page_url(listeners)
    thread = threading.Thread(target=_open_url, args=(url, open_url or webbrowser.open), name="open-page", daemon=True)
    thread.start()
    return thread


def _open_url(url: str | None, open_url: Callable[[str], bool]) -> None:
    if url is None:
        notice("--open needs a TCP port: browsers cannot open a Unix socket")
        return
    try:
        opened = open_url(url)
    except (OSError, webbrowser.Error):
        opened = False
    if not opened:
        notice(f"no browser could be opened: the page is at {url}")


def page_url(listeners: Sequence[socket.socket]) -> str | None:
    """The page's address on this machine; None without TCP."""
    for listener in listeners:
        if listener.family != socket.AF_UNIX:
            host = "[::1]" if listener.family == socket.AF_INET6 else "127.0.0.1"
            everywhere = listener.getsockname()[0] in ("0.0.0.0", "::")
            return f"http://{host}:{listener.getsockname()[1]}/" if everywhere else f"{address(listener)}/"
    return None


async def _unless(stop: asyncio.Event, loading: asyncio.Future[Any]) -> bool:
    """True if loading finished before `stop` was set; otherwise cancel it and return False. Raises the errors of `loading`."""
    signalled = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([loading, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return False
        loading.result()
        return True
    finally:
        signalled.cancel()
        loading.cancel()
