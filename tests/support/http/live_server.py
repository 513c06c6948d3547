"""A server on real sockets, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.access.sockets import listening
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.memory_room import MemoryRoom
from mlxinfer.server.model_manager.registry import Registry
from mlxinfer.server.process import HTTPServer
from mlxinfer.server.settings import ServerSettings
from mlxinfer.types import EngineStats
from support.processes.optional import needs
from support.processes.short_paths import short_directory

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass
class LiveServer:
    path: Path
    port: int
    models: dict[str, AsyncLLM]
    server: HTTPServer
    served: Served

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self, model: str = "tiny") -> EngineStats:
        return self.models[model].stats()

    def connect(self, *, unix: bool) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(30)
        sock.connect(str(self.path) if unix else ("127.0.0.1", self.port))
        return sock

    def exchange(self, raw: bytes, *, unix: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Send these bytes and read one answer: its status, headers and body."""
        with self.connect(unix=unix) as connection:
            connection.sendall(raw)
            response = HTTPResponse(connection)
            response.begin()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    def until(self, condition: Callable[[EngineStats], bool], model: str = "tiny", seconds: float = 20) -> EngineStats:
        """Wait until the engine's statistics satisfy the condition, and return them."""
        deadline = time.monotonic() + seconds
        while not condition(found := self.stats(model)):
            assert time.monotonic() < deadline, found
            time.sleep(0.002)
        return found


@dataclass
class Served:
    """Parts of a server."""

    registry: Registry
    manager: ModelManager
    models: dict[str, AsyncLLM]
    """Engines to close at the end."""


@contextmanager
def live_server(loads: Mapping[str, Callable[[], AsyncLLM]], **settings: Any) -> Iterator[LiveServer]:
    """Serve on a Unix socket and on TCP until the end of the block; then everything is drained and closed."""

    async def load() -> Served:
        models = {name: load() for name, load in loads.items()}
        await asyncio.gather(*(llm.ready() for llm in models.values()))
        registry = Registry.running(models)
        return Served(registry, ModelManager(registry.slots, MemoryRoom()), models)

    with live_registry(load, **settings) as live:
        yield live


@contextmanager
def live_registry(make: Callable[[], Awaitable[Served]], **settings: Any) -> Iterator[LiveServer]:
    """As `live_server`, for the result of `make`."""
    started: Future[LiveServer] = Future()
    with short_directory() as folder, listening(config := _settings(folder / "api.sock", settings)) as sockets:
        path = folder / "api.sock"
        port = sockets[1].getsockname()[1]

        async def main() -> None:
            served: Served | None = None
            try:
                served = await make()
                server = HTTPServer(served.registry, served.manager, config)
                live = LiveServer(path, port, served.models, server, served)
                server._ready = lambda: started.set_result(live)
                await server.serve(sockets)
            except BaseException as error:
                if not started.done():
                    started.set_exception(error)
                raise
            finally:
                if served is not None:
                    await served.manager.close()
                    for llm in served.models.values():
                        await llm.close()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        try:
            live = started.result(60)
            yield live
            live.server.end()
        except BaseException:
            if started.done() and not started.exception():
                started.result().server.end()
            raise
        finally:
            thread.join(60)
            assert not thread.is_alive()


def _settings(socket: Path, more: Mapping[str, Any]) -> ServerSettings:
    return ServerSettings(**{"socket": socket, "host": "127.0.0.1", "port": 0, **more})


def openai_client(live: LiveServer, *, unix: bool, **settings: object) -> OpenAI:
    """OpenAI's client for this server, without retries and without certificates, which take 50 ms to read."""
    httpx2, openai = needs("httpx2"), needs("openai")
    transport = httpx2.HTTPTransport(uds=str(live.path), verify=False) if unix else httpx2.HTTPTransport(verify=False)
    options = {"base_url": f"{live.url}/v1", "api_key": "unused", "max_retries": 0, **settings}
    return openai.OpenAI(**options, http_client=httpx2.Client(transport=transport, timeout=60))  # type: ignore[arg-type]
