"""A server of several tiny models that do not all fit in its memory together."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from mlxinfer.config import EngineArgs
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.loading.memory.budget import BUDGET
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.memory_room import MemoryRoom
from mlxinfer.server.model_manager.model_slot import FOR_EVER, ModelSlot
from mlxinfer.server.model_manager.registry import Registry
from support.hostile.cases import request
from support.http.live_server import LiveServer, Served, live_registry
from support.models.tiny_directory import tiny_directory
from support.processes.active_memory import active_memory

ARCHITECTURES = ("llama", "qwen2", "gemma3_text", "granite", "olmo2")
CONTEXT = 512
ROOM_FOR_ONE = 30_000_000
"""Bytes. A tiny model needs 17.7 million at least."""


@dataclass
class Watch:
    """Events in the server."""

    events: list[tuple[str, str]] = field(default_factory=list)
    """("open" or "back", name of the model), in order."""
    most_planned: int = 0
    """Maximum of the planned bytes of all models."""
    left_over: list[int] = field(default_factory=list)
    """Bytes held by MLX after each unloading, more than before the first load."""
    gates: dict[str, threading.Event] = field(default_factory=dict)
    """Loading a model with a gate waits until the gate is open."""
    faults: dict[str, Exception] = field(default_factory=dict)
    """Errors to raise when a model is opened."""
    before: int = 0

    @property
    def opened(self) -> Counter[str]:
        return Counter(name for what, name in self.events if what == "open")

    def planned(self) -> None:
        self.most_planned = max(self.most_planned, BUDGET.planned - self.before)


class WatchedMemory(MemoryRoom):
    def __init__(self, limit: int, watch: Watch) -> None:
        super().__init__(limit)
        self._watch = watch
        gc.collect()  # objects of earlier tests may be freed at any moment
        self._active = active_memory()
        watch.before = BUDGET.planned

    async def wait_until_freed(self, slot: ModelSlot) -> None:
        await super().wait_until_freed(slot)
        self._watch.planned()
        self._watch.events.append(("back", slot.name))
        if not self.planned:
            self._watch.left_over.append(active_memory() - self._active)


@dataclass
class Kept:
    live: LiveServer
    watch: Watch
    slots: dict[str, ModelSlot]

    def ask(self, model: str, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the answer."""
        fields = {"model": model, **({"prompt": "Hello", "max_tokens": 4, "temperature": 0} if path == "/v1/completions" else {}), **body}
        status, headers, raw = self.live.exchange(request(path, json.dumps(fields).encode(), "Content-Type: application/json"), unix=True)
        return status, headers, json.loads(raw)

    def get(self, path: str) -> Any:
        return json.loads(self.live.exchange(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), unix=True)[2])

    def begin(self, model: str, *, stream: bool = True, **body: Any) -> socket.socket:
        """Start four long answers on a new connection."""
        fields = {"model": model, "prompt": "Hello", "max_tokens": 400, "n": 4, "temperature": 0, "stream": stream, **body}
        connection = self.live.connect(unix=True)
        connection.sendall(request("/v1/completions", json.dumps(fields).encode(), "Content-Type: application/json"))
        return connection

    def until_busy(self, model: str) -> None:
        """Wait until the model is loaded and a request uses it."""
        self.until(lambda: self.slots[model].state == "ready" and self.slots[model].users > 0)

    def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.states(), self.watch.events)
            time.sleep(0.002)

    def reset(self) -> None:
        """Unload all models and forget all events."""
        for name in self.slots:
            self.ask(name, "/models/unload")
        self.until(lambda: set(self.states().values()) == {"listed"})
        self.watch.events.clear()
        self.watch.gates.clear()
        self.watch.faults.clear()

    def states(self) -> dict[str, str]:
        return {name: slot.state for name, slot in self.slots.items()}


def read_all(connection: socket.socket) -> str:
    """The body of the response, to its end."""
    with connection:
        response = HTTPResponse(connection)
        response.begin()
        return response.read().decode()


def tiny_models(folder: Path, names: str) -> dict[str, Path]:
    """A model of a different architecture for each letter."""
    return {
        name: tiny_directory(folder / name, architecture, eos=False, rounded=True, context=CONTEXT)
        for name, architecture in zip(names, ARCHITECTURES, strict=False)
    }


@contextmanager
def kept_models(
    paths: Mapping[str, Path],
    memory: int = ROOM_FOR_ONE,
    *,
    dwell_s: float = 0.0,
    most_waiting: int = 256,
    keep_alive_s: float = FOR_EVER,
    contexts: Mapping[str, int] | None = None,
    pinned: str = "",
    broken_s: float = 60.0,
    adapter_memory_gb: float = 0.0,
    aliases: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[Kept]:
    """A server of these models, all unloaded at the start."""
    watch, slots = Watch(), dict[str, ModelSlot]()

    def open_model(name: str) -> Callable[[EngineArgs], AsyncLLM]:
        def opened(args: EngineArgs) -> AsyncLLM:
            watch.planned()
            watch.events.append(("open", name))
            if name in watch.faults:
                raise watch.faults[name]
            gate = watch.gates.get(name)
            adapters = {"adapters": args.adapters, "adapter_memory_gb": args.adapter_memory_gb}
            given = {**adapters, "max_context": args.max_context, "max_num_seqs": args.max_num_seqs, "memory_gb": args.memory_gb}
            return AsyncLLM(args.path_or_id, progress=(lambda *_: bool(gate.wait(30)) and None) if gate else None, **given)  # type: ignore[arg-type]

        return opened

    async def make() -> Served:
        for name, path in paths.items():
            args = EngineArgs(path, max_context=(contexts or {}).get(name, CONTEXT), max_num_seqs=4, adapter_memory_gb=adapter_memory_gb)
            slots[name] = ModelSlot(args, open_model(name), keep_alive_s=keep_alive_s, pinned=name in pinned)
        registry = Registry(slots, aliases)
        manager = ModelManager(registry.slots, WatchedMemory(memory, watch), dwell_s=dwell_s, most_waiting=most_waiting, broken_s=broken_s)
        return Served(registry, manager, {})

    with live_registry(make, **settings) as live:
        yield Kept(live, watch, slots)
    watch.planned()
