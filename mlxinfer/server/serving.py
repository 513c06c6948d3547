"""Runs a request of any dialect on its model: counted, logged, and stopped when nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import MLXInferError
from ..types import Chunk, Completion, FinishReason, SamplingParams, TokenLogprob, Usage
from .errors import APIError, of_error, timed_out
from .metrics import RequestMetrics
from .models import ServedModel
from .routing import RequestContext

T = TypeVar("T")

_LONG_TEXT = 4096
"""Characters; a longer text is tokenized beside the event loop."""
_BUFFERED = 64


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt as token ids, and what to do with it."""

    served: ServedModel
    prompt: list[int]
    params: SamplingParams
    client_id: str = ""


async def encode_chat(served: ServedModel, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
    """The conversation through the model's template. Raises `APIError`."""
    size = sum(len(str(message.get("content", ""))) for message in messages)
    return await _encode(size, lambda: served.llm.tokenizer.encode_chat(messages, **variables))


async def encode_text(served: ServedModel, text: str) -> list[int]:
    """Raises `APIError`."""
    return await _encode(len(text), lambda: served.llm.tokenizer.encode(text))


async def _encode(size: int, work: Any) -> list[int]:
    try:
        ids: list[int] = work() if size < _LONG_TEXT else await asyncio.to_thread(work)
    except MLXInferError as error:
        raise of_error(error) from error
    return ids


async def bursts(call: RequestContext, ask: GenerateRequest) -> AsyncGenerator[list[Chunk], None]:
    """The pieces of all `n` answers, as many together as came together. Closing the iterator cancels the request. Raises `APIError`."""
    tally = _begin(call, ask)
    open_answers = ask.params.n
    try:
        async with aclosing(ask.served.llm.bursts(ask.prompt, ask.params, **_terms(call, ask))) as incoming:
            async for burst in incoming:
                tally.burst(burst)
                for chunk in burst:
                    if chunk.finish_reason:
                        open_answers -= 1
                        _note_end(call, chunk.finish_reason, chunk.usage, chunk.index)
                yield burst
    except MLXInferError as error:
        raise of_error(error) from error
    finally:
        _end(call, tally, whole=not open_answers)


async def patiently(pieces: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """These pieces, after a None if the first of them is not there within `seconds`: so that something can be said meanwhile."""
    async with aclosing(pieces):
        first = asyncio.ensure_future(anext(pieces))
        try:
            await asyncio.wait([first], timeout=seconds)
            if not first.done():
                yield None
            yield await first
        except StopAsyncIteration:
            return
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async for piece in pieces:
            yield piece


def _terms(call: RequestContext, ask: GenerateRequest) -> dict[str, Any]:
    return {"client_id": ask.client_id, "timeout_s": call.server.settings.limits.request_s}


def _begin(call: RequestContext, ask: GenerateRequest) -> RequestMetrics:
    call.log["model"] = ask.served.name
    return call.server.metrics.begin(ask.served.name)


def _end(call: RequestContext, tally: RequestMetrics, *, whole: bool) -> None:
    tally.end(whole)
    if tally.first_s is not None:
        call.log.setdefault("first_token_ms", round(tally.first_s * 1000, 1))


def _note_end(call: RequestContext, reason: FinishReason, usage: Usage | None, index: int) -> None:
    """For the log; raises `APIError` for an answer that was ended."""
    if reason == "timeout":
        raise timed_out()
    if reason == "cancelled":
        raise APIError(503, "overloaded", "The request was stopped: the server is shutting down.", code="engine_stopped")
    log = call.log
    log["finish_reason"] = reason
    if usage is None:
        return
    if index == 0:
        log["prompt_tokens"] = log.get("prompt_tokens", 0) + usage.prompt_tokens
        log["cached_tokens"] = log.get("cached_tokens", 0) + usage.stats.reused_tokens
    log["completion_tokens"] = log.get("completion_tokens", 0) + usage.completion_tokens


async def collect(call: RequestContext, ask: GenerateRequest) -> list[Completion]:
    """All `n` answers, whole. Raises `APIError`."""
    tally = _begin(call, ask)
    completions: list[Completion] = []
    try:
        completions = await ask.served.llm.generate([ask.prompt], ask.params, **_terms(call, ask))
        for completion in completions:
            tally.completion(completion)
            _note_end(call, completion.finish_reason, completion.usage, completion.index)
        return completions
    except MLXInferError as error:
        raise of_error(error) from error
    finally:
        _end(call, tally, whole=bool(completions))


async def score(call: RequestContext, ask: GenerateRequest, top: int) -> list[TokenLogprob]:
    """How likely each token of the prompt is, from the second on. Raises `APIError`."""
    call.log["model"] = ask.served.name
    try:
        return await ask.served.llm.score(ask.prompt, top, **_terms(call, ask))
    except MLXInferError as error:
        raise of_error(error) from error


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All of it at once. If one fails, so do all."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, piece) of several, as they come. If one fails, so do all; at the end all are closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, T] | APIError | None] = asyncio.Queue(_BUFFERED)
    tasks = [asyncio.ensure_future(_feed(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, APIError):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(number: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | APIError | None]) -> None:
    try:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                await queue.put((number, piece))
        await queue.put(None)
    except APIError as problem:
        await queue.put(problem)
