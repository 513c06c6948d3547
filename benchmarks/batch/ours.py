"""This project, through `AsyncLLM`."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from time import perf_counter
from typing import Any

from mlxinfer import AsyncLLM, Chunk, SamplingParams

from .client import Piece, Prompt, Subject

_QUIET_S, _MOST_S = 1.0, 30.0
_TOKENS = range(32, 96)
"""Ids in every vocabulary that are not special tokens."""


class Ours(Subject):
    def load(self, model: str, *, threads: int, context: int, **settings: Any) -> dict[str, Any]:
        from importlib.metadata import version

        from mlxinfer.util.background import finish_background_work

        self._folder = Path(settings.get("prefix_dir", ""))
        self._llm = self.wait(self._open(model, settings))
        finish_background_work()
        return {"version": version("mlxinfer")}

    async def _open(self, model: str, settings: dict[str, Any]) -> AsyncLLM:
        return await AsyncLLM(model, **settings).__aenter__()

    def close(self) -> dict[str, Any]:
        self.wait(self._llm.__aexit__(None, None, None))
        return {}

    async def stream(self, prompt: Prompt, tokens: int, *, endless: bool) -> AsyncGenerator[Piece, None]:
        params = SamplingParams(temperature=float(endless), max_tokens=tokens, ignore_eos=endless)
        chunks = self._llm.stream(prompt, params) if isinstance(prompt, str) else self._llm.stream_chat(prompt, params)
        async for chunk in chunks:
            yield _piece(chunk)

    def decode(self, depth: int, streams: int, steps: int) -> dict[str, Any]:
        """Time `streams` answers to random prompts, from the request to the last token."""
        prompts = [random.Random(stream).choices(_TOKENS, k=depth) for stream in range(streams)]
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        begun = perf_counter()
        self.wait(self._llm.generate(prompts, params))
        return {"seconds": perf_counter() - begun}

    def write(self, prompts: list[Prompt], tokens: int, temperature: float) -> dict[str, Any]:
        """Answer all prompts at once. Returns `tokens`, `seconds`, the tokens `drafted` and `accepted`, and a `checksum` of the answers."""
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1)
        begun = perf_counter()
        done = self.wait(self._together(prompts, params))
        seconds = perf_counter() - begun
        stats = [chunk.usage.stats for chunks in done for chunk in chunks if chunk.usage]
        ids = [token for chunks in done for chunk in chunks for token in chunk.token_ids]
        return {
            "seconds": seconds,
            "tokens": len(ids),
            "drafted": sum(each.drafted_tokens for each in stats),
            "accepted": sum(each.accepted_tokens for each in stats),
            "checksum": zlib.crc32(repr(ids).encode()),
        }

    async def _together(self, prompts: list[Prompt], params: SamplingParams) -> list[list[Chunk]]:
        return await asyncio.gather(*(self._collect(prompt, params) for prompt in prompts))

    async def _collect(self, prompt: Prompt, params: SamplingParams) -> list[Chunk]:
        chunks = self._llm.stream(prompt, params) if isinstance(prompt, str) else self._llm.stream_chat(prompt, params)
        return [chunk async for chunk in chunks]

    def save(self) -> dict[str, Any]:
        self.wait(self._settle(self._folder))
        return {}

    async def _settle(self, folder: Path) -> None:
        """Wait until all writes to disk are done."""
        begun = changed = perf_counter()
        before = -1
        while perf_counter() - changed < _QUIET_S and perf_counter() - begun < _MOST_S:
            await asyncio.sleep(0.05)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if size != before:
                before, changed = size, perf_counter()

    def restored(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        return self.answer(prompt, tokens)


def _piece(chunk: Chunk) -> Piece:
    usage = chunk.usage
    if usage is None:
        return Piece(chunk.text, len(chunk.token_ids))
    return Piece(chunk.text, len(chunk.token_ids), usage.prompt_tokens, usage.stats.reused_tokens, usage.completion_tokens)
