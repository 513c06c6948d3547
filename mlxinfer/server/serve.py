"""The server's process: opens sockets, loads models, runs uvicorn, and ends on signals."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import AsyncExitStack, contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any

import uvicorn

from .app import create_app
from .connection import connection_class
from .log import notice, start_logging
from .models import Registry
from .open_files import with_files
from .page import open_page
from .settings import ServerSettings
from .sockets import address, listening

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM

_LAST_WORDS_S = 2.0
"""Seconds that a client has, after the second signal, to read that its answer was stopped."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Load = Callable[[], "AsyncLLM"]
"""Starts loading a model."""


class HTTPServer(uvicorn.Server):
    """Uvicorn with this server's application and limits. `ready()` is called when it listens."""

    def __init__(self, models: Registry, settings: ServerSettings, *, ready: Callable[[], None] = lambda: None) -> None:
        limits = settings.limits
        config = uvicorn.Config(
            create_app(models, settings),
            http=connection_class(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=ceil(limits.header_s),
            h11_max_incomplete_event_size=limits.header_bytes,
        )
        super().__init__(config)
        self._ready = ready
        self._opens_page = settings.opens_page

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
        if self._opens_page:
            open_page(sockets or ())

    def end(self) -> None:
        """The first call closes the listeners and lets running requests finish; the second cancels them."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to `run`, since the server may be one part of a process."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        _, deaf = await asyncio.wait(tasks, timeout=_LAST_WORDS_S) if tasks else ((), ())
        if deaf:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.gather(*deaf, return_exceptions=True)


def run(
    loads: Mapping[str, Load], settings: ServerSettings, *, aliases: Mapping[str, str] | None = None, tell: Callable[[str], Any] = print
) -> None:
    """Load the models and serve them until SIGINT or SIGTERM. `tell` is given the line that says where.

    The sockets are opened first, so clients that connect while models load wait instead of failing. Raises `MLXInferError`.
    """
    start_logging()
    # A parent process may have blocked them, as Foundation does on Linux, and children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    settings = with_files(settings)
    with listening(settings) as sockets:
        asyncio.run(_run(loads, settings, sockets, aliases or {}, tell))


async def _run(
    loads: Mapping[str, Load],
    settings: ServerSettings,
    sockets: list[socket.socket],
    aliases: Mapping[str, str],
    tell: Callable[[str], Any],
) -> None:
    stop = asyncio.Event()
    server: HTTPServer | None = None

    def on_signal() -> None:
        stop.set()
        if server is not None:
            server.end()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    async with AsyncExitStack() as stack:
        models: dict[str, AsyncLLM] = {}
        for name, load in loads.items():
            models[name] = load()
            stack.push_async_callback(models[name].close)
        if not await _unless(stop, asyncio.gather(*(llm.ready() for llm in models.values()))):
            return
        for name, llm in models.items():
            for note in llm.notes:
                notice(note, model=name)

        def ready() -> None:
            tell(f"ready on {' and '.join(map(address, sockets))} ({', '.join(models)})")
            for llm in models.values():
                llm.prepare_structures()

        server = HTTPServer(Registry(models, aliases), settings, ready=ready)
        await server.serve(sockets)


async def _unless(stop: asyncio.Event, loading: asyncio.Future[Any]) -> bool:
    """Whether loading ended before `stop` was set; otherwise it is cancelled. Raises what loading raises."""
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
