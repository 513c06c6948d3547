"""The interface of a server or library under test, and the measurements that all of them share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, TypeVar, Union

from .texts import Messages

Prompt = Union[str, Messages]
Value = TypeVar("Value")

_ENDLESS = 6000
"""Token limit of an endless stream."""
_LEAST_TOKENS = 8
_GONE_S = 0.2
"""Seconds in which a server notices a closed connection, at its next token."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer. One of the last pieces has the token counts."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    answer_tokens: int = 0


class Subject(ABC):
    """A server or library under test. The methods that are jobs of a worker return its answer."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    @abstractmethod
    def load(self, model: str, *, threads: int, context: int, **settings: Any) -> dict[str, Any]:
        """Prepare for sequences of `context` tokens. Returns `version`."""

    @abstractmethod
    def stream(self, prompt: Prompt, tokens: int, *, endless: bool) -> AsyncGenerator[Piece, None]:
        """Continue a text, or answer messages, greedily. An `endless` answer is sampled, and the model cannot end it."""

    def close(self) -> dict[str, Any]:
        return {}

    def save(self) -> dict[str, Any]:
        """Write the cache to disk for the next process."""
        raise NotImplementedError

    def restored(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        """`answer` with the cache that an earlier process has written. The time includes reading the cache."""
        raise NotImplementedError

    def cpu_seconds(self) -> float:
        """Processor time until now, in seconds."""
        return process_time()

    def answer(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        """Answer a prompt. Returns `first_s`, seconds to the first token, and the `text` and counts."""
        return self.wait(self._answer(prompt, tokens))

    def beside(self, prompt: str, long: str, alone_s: float) -> dict[str, Any]:
        """Measure tokens per second of a stream: `alone`, before and after, and `beside`, while a long prompt is read. `first_s` is the
        time to the first token of that prompt."""
        return self.wait(self._beside(prompt, long, alone_s))

    def wait(self, work: Coroutine[Any, Any, Value]) -> Value:
        return self._loop.run_until_complete(work)

    async def _answer(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        begun = perf_counter()
        first, text, counts = 0.0, "", Piece()
        async for piece in self.stream(prompt, tokens, endless=False):
            if piece.tokens and not first:
                first = perf_counter() - begun
            text += piece.text
            counts = piece if piece.prompt_tokens else counts
        found = {name: getattr(counts, name) for name in ("prompt_tokens", "reused_tokens", "answer_tokens")}
        return {"first_s": first or perf_counter() - begun, "text": text} | found

    async def _beside(self, prompt: str, long: str, alone_s: float) -> dict[str, Any]:
        times: list[float] = []
        listening = asyncio.ensure_future(self._listen(prompt, times))
        try:
            before = await _interval(listening, times, alone_s)
            begun, had = perf_counter(), len(times)
            async with aclosing(self.stream(long, 2, endless=True)) as pieces:
                async for piece in pieces:
                    if piece.tokens:
                        break
            first, meanwhile = perf_counter() - begun, len(times) - had
            await asyncio.sleep(_GONE_S)
            after = await _interval(listening, times, alone_s)
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
        await asyncio.sleep(_GONE_S)
        # The stream has grown longer meanwhile, which alone makes it slower.
        return {"alone": 2 / (before + after), "beside": meanwhile / first, "first_s": first}

    async def _listen(self, prompt: str, times: list[float]) -> None:
        async with aclosing(self.stream(prompt, _ENDLESS, endless=True)) as pieces:
            async for piece in pieces:
                times += [perf_counter()] * piece.tokens


async def _interval(listening: asyncio.Future[None], times: list[float], least_s: float) -> float:
    """Seconds between two tokens, from now on."""
    had = len(times)
    while len(times) <= had + _LEAST_TOKENS or times[-1] - times[had] < least_s:
        if listening.done():
            listening.result()
            raise ValueError("the stream ended too early")
        await asyncio.sleep(0.005)
    return (times[-1] - times[had]) / (len(times) - had - 1)
