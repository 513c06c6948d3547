"""What the server adds to a step: the engine is asked in turns by its own process and over HTTP, so that nothing else differs."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from statistics import mean
from subprocess import PIPE
from typing import Any

from mlxinfer import AsyncLLM, SamplingParams
from mlxinfer.server.models import Registry
from mlxinfer.server.serve import HTTPServer
from mlxinfer.server.settings import LOOPBACK, ServerSettings

NAME = "bench"
_REST_S = 0.02


def greedy(steps: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)


def body(prompt: str, steps: int) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": steps, "temperature": 0, "ignore_eos": True}


async def bare_step(llm: AsyncLLM, prompts: Sequence[str], steps: int) -> float:
    """Seconds between two tokens of a stream, of all prompts at once."""
    return mean(1 / answer.usage.decode_tps for answer in await llm.generate(prompts, greedy(steps)))


async def measure(llm: AsyncLLM, prompts: Sequence[str], steps: int, pairs: int) -> list[tuple[float, float]]:
    """(bare, served): seconds between two tokens of a stream, so often, after a first time that does not count."""
    found = []
    async with _serving(llm) as port, _client() as client:
        for number in range(pairs + 1):
            times: dict[bool, float] = {}
            for bare in (True, False) if number % 2 else (False, True):
                await asyncio.sleep(_REST_S)
                times[bare] = await (bare_step(llm, prompts, steps) if bare else _served_step(client, port, prompts, steps))
            found.append((times[True], times[False]))
    return found[1:]


@asynccontextmanager
async def _serving(llm: AsyncLLM) -> AsyncGenerator[int, None]:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        server = HTTPServer(Registry({NAME: llm}, {}), ServerSettings(host=LOOPBACK, port=port))
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            yield port
        finally:
            server.end()
            await serving


@asynccontextmanager
async def _client() -> AsyncGenerator[asyncio.subprocess.Process, None]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.serving.client", stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _served_step(client: asyncio.subprocess.Process, port: int, prompts: Sequence[str], steps: int) -> float:
    assert client.stdin is not None
    assert client.stdout is not None
    job = {"port": port, "bodies": [body(prompt, steps) for prompt in prompts], "pieces": steps}
    client.stdin.write(json.dumps(job).encode() + b"\n")
    seconds: float = json.loads(await client.stdout.readline())
    return seconds
