"""Measures the server's share: engine and server in one process, the engine called directly and over HTTP, alternating."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import mean
from subprocess import PIPE
from typing import Any

from mlxinfer import AsyncLLM, SamplingParams
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.memory_room import MemoryRoom
from mlxinfer.server.model_manager.registry import Registry
from mlxinfer.server.process import HTTPServer
from mlxinfer.server.settings import LOOPBACK, ServerSettings

NAME = "bench"
_REST_S = 0.02


def greedy(steps: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)


def body(prompt: str, steps: int) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": steps, "temperature": 0, "ignore_eos": True}


async def bare_step(llm: AsyncLLM, prompts: Sequence[str], steps: int) -> float:
    """Seconds between two tokens of a stream, for all prompts at once."""
    return mean(1 / answer.usage.decode_tps for answer in await llm.generate(prompts, greedy(steps)))


async def measure(llm: AsyncLLM, prompts: Sequence[str], steps: int, pairs: int) -> list[tuple[float, float]]:
    """Measure `pairs` pairs of (bare, served): seconds between two tokens of a stream, after a warm-up."""
    found, bodies = [], [body(prompt, steps) for prompt in prompts]
    async with _serving(llm) as port, _client() as ask:
        for number in range(pairs + 1):
            times: dict[bool, float] = {}
            for bare in (True, False) if number % 2 else (False, True):
                await asyncio.sleep(_REST_S)
                times[bare] = await (bare_step(llm, prompts, steps) if bare else ask(port=port, bodies=bodies, pieces=steps))
            found.append((times[True], times[False]))
    return found[1:]


@asynccontextmanager
async def _serving(llm: AsyncLLM) -> AsyncGenerator[int, None]:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        registry = Registry.running({NAME: llm})
        server = HTTPServer(registry, ModelManager(registry.slots, MemoryRoom()), ServerSettings(host=LOOPBACK, port=port))
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            yield port
        finally:
            server.end()
            await serving


@asynccontextmanager
async def _client() -> AsyncGenerator[Callable[..., Awaitable[float]], None]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.serving.client", stdin=PIPE, stdout=PIPE)
    to, back = process.stdin, process.stdout
    assert to is not None
    assert back is not None

    async def ask(**job: Any) -> float:
        to.write(json.dumps(job).encode() + b"\n")
        answer: float = json.loads(await back.readline())
        return answer

    try:
        yield ask
    finally:
        to.close()
        await process.wait()
