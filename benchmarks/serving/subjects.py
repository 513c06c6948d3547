"""The servers, and the engine without a server. All have the same jobs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from ..batch.ours import Ours
from ..batch.servers import LlamaServer, MLXServer, Server
from . import client
from .pairs import NAME, bare_step, greedy, measure


class Served(Server):
    """A subject that is called over HTTP."""

    def listen(self, url: str, model: str) -> None:
        super().listen(url, model)
        self._port = int(url.rpartition(":")[2])

    def step(self, prompts: Sequence[str], steps: int) -> dict[str, Any]:
        """Seconds between two tokens of a stream, for all prompts at once."""
        return {"seconds": self.wait(client.step(self._port, [self._body(prompt, steps) for prompt in prompts], steps))}

    def connect(self, prompt: str, times: int) -> dict[str, Any]:
        """Seconds from connecting to the first `byte` and to the `first` token, for a prompt in the server's cache."""
        self.wait(client.stream(self._port, self._body(prompt, 2), 1))
        found = [self.wait(client.stream(self._port, self._body(prompt, 2), 1)) for _ in range(times)]
        return {"byte": median(each.byte for each in found), "first": median(each.first for each in found)}

    def short(self, prompts: Sequence[str], connections: int, tokens: int) -> dict[str, Any]:
        """Seconds for short answers to all prompts."""
        return {"seconds": self.wait(client.whole(self._port, [self._body(prompt, tokens) for prompt in prompts], connections))}

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0} | self._more(True)


class OurServer(Served):
    def _command(self, model: str, port: int, threads: int, context: int, settings: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", "mlxinfer", "serve", f"{NAME}={model}", "--no-socket", "--port", str(port), "--no-speculate"]

    def _version(self) -> str:
        from importlib.metadata import version

        return version("mlxinfer")

    def _more(self, endless: bool) -> dict[str, Any]:
        return {"model": NAME, "ignore_eos": endless}


class OtherLlamaServer(Served, LlamaServer):
    pass


class OtherMLXServer(Served, MLXServer):
    pass


class Engine(Ours):
    """The baseline of the server: the same engine in a process that does nothing else."""

    def load(self, model: str, *, threads: int, context: int, **settings: Any) -> dict[str, Any]:
        return super().load(model, threads=threads, context=context, speculate=False)

    def step(self, prompts: Sequence[str], steps: int) -> dict[str, Any]:
        return {"seconds": self.wait(bare_step(self._llm, prompts, steps))}

    def pairs(self, prompts: Sequence[str], steps: int, pairs: int) -> dict[str, Any]:
        """Seconds per step without the server and with it, alternating."""
        return {"pairs": self.wait(measure(self._llm, prompts, steps, pairs))}

    def connect(self, prompt: str, times: int) -> dict[str, Any]:
        found = [self.wait(self._first(prompt)) for _ in range(times + 1)][1:]
        return {"byte": median(found), "first": median(found)}

    async def _first(self, prompt: str) -> float:
        begun, first = perf_counter(), 0.0
        async for _ in self._llm.stream(prompt, greedy(2)):
            first = first or perf_counter() - begun
        return first

    def short(self, prompts: Sequence[str], connections: int, tokens: int) -> dict[str, Any]:
        begun = perf_counter()
        self.wait(self._all(prompts, connections, tokens))
        return {"seconds": perf_counter() - begun}

    async def _all(self, prompts: Sequence[str], connections: int, tokens: int) -> None:
        waiting = iter(prompts)

        async def one() -> None:
            for prompt in waiting:
                await self._llm.generate(prompt, greedy(tokens))

        await asyncio.gather(*(one() for _ in range(connections)))
