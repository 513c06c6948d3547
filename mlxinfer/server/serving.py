"""Runs generation requests of all dialects: counts and logs them, and cancels them when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.text.chat_prompt import continued
from ..errors import MLXInferError, PromptError, SamplingError, TemplateError
from ..output_format.history import REASONING_NAMES
from ..types import Chunk, Completion, FinishReason, SamplingParams, TokenLogprob, Usage
from . import sse
from .errors import APIError, from_engine_error, invalid, stopping, timed_out, unsupported
from .metrics import RequestMetrics
from .model_manager.registry import ServedModel
from .routing import RequestContext
from .shared.images import decoded, joined, sent_images, with_bytes, with_places
from .shared.structure import structure_refused
from .shared.tools import NO_TOOLS, Offer, schema_refused

if TYPE_CHECKING:
    from ..engine.request_keywords import RequestKeywords
    from ..engine.text.chat_prompt import ChatPrompt

T = TypeVar("T")
_Render = Callable[[Sequence[Mapping[str, Any]]], Awaitable[T]]
"""Renders messages with the model's chat template."""

_LONG_TEXT = 4096
"""Characters. Tokenizing a longer text would block the event loop, so a thread does it."""
_BUFFERED = 64
"""Pieces of merged streams that may wait for the client."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request from a dialect to the engine."""

    served: ServedModel
    prompt: list[int] | ChatPrompt
    """Token ids, or a rendered conversation."""
    params: SamplingParams
    """Sampling parameters, stop conditions and the number of answers."""
    client_id: str = ""
    """Id for fair scheduling; empty means the sender of the request."""
    cache_salt: str = ""
    """Cached prompts are shared only among requests with the same salt."""
    structure_field: str = "structure"
    """The request's field behind `params.structure`, for error messages."""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.prompt if isinstance(self.prompt, list) else self.prompt.token_ids


async def encode_chat(
    context: RequestContext,
    served: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    offer: Offer = NO_TOOLS,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """A conversation, rendered by the model's chat template with these tools and additional `variables`. If the template fails,
    neighbouring messages of the same role are merged first. Images wait for their turn to be decoded. Raises `APIError`, and
    `ClientGone` if the client disconnects while its images wait."""
    return await _with_images(context, served, messages, _keywords(served.llm.chat_prompt, offer, variables))


async def count_chat(
    context: RequestContext,
    served: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    offer: Offer = NO_TOOLS,
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Tokens of the prompt of `encode_chat`. Images are not decoded, since their headers are enough. Raises as `encode_chat`."""
    return await _with_images(context, served, messages, _keywords(served.llm.count_tokens, offer, variables))


def _keywords(render: Callable[..., Awaitable[T]], offer: Offer, variables: Mapping[str, Any] | None) -> _Render[T]:
    return partial(render, tools=offer.tools, tool_choice=offer.choice, template_vars=variables)


async def _with_images(context: RequestContext, served: ServedModel, messages: Sequence[Mapping[str, Any]], render: _Render[T]) -> T:
    """The result of `render` for these messages with the bytes of their images. Raises `APIError`."""
    images = sent_images(messages)
    if not images:
        return await _rendered(render, messages)
    if served.blind_reason is not None:
        where = images[0].where
        raise unsupported(where, f"{where}: {served.blind_reason}")
    context.log["images"] = len(images)

    async def decode_and_render() -> T:
        files = await asyncio.to_thread(decoded, images)
        return await _rendered(lambda sent: render(with_bytes(sent, files)), messages)

    return await sse.unless_gone(context.receive, context.server.pictures.run(decode_and_render))


async def _rendered(render: _Render[T], messages: Sequence[Mapping[str, Any]]) -> T:
    """The result of `render` for these messages, or else for the merged ones. Raises `APIError`."""
    try:
        try:
            return await render(messages)
        except TemplateError:
            fewer = _merge_neighbours(messages)
            if len(fewer) == len(messages):
                raise
            messages = fewer
            return await render(messages)
    except MLXInferError as error:
        raise with_places(error, messages) from error


async def encode_continued(
    context: RequestContext,
    served: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    offer: Offer = NO_TOOLS,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """A conversation whose last message is an answer to continue. Raises `APIError`."""
    last = messages[-1] if messages else {}
    content, reasoning = last.get("content") or "", next((last[name] for name in REASONING_NAMES if last.get(name)), "")
    if last.get("role") != "assistant" or last.get("tool_calls") or not (content or reasoning):
        raise invalid("continue_final_message: the last message must be an answer with text", "continue_final_message", "invalid_value")
    prompt = await encode_chat(context, served, messages[:-1], offer, variables)
    return continued(prompt, served.llm.tokenizer, content, reasoning)


def _merge_neighbours(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge neighbouring messages of the role system, or user. Coding agents send several, but some templates want a single system
    message and alternating turns."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        plain = message.keys() == last.keys() == {"role", "content"}
        if plain and message["role"] == last["role"] and message["role"] in ("system", "user"):
            found[-1] = {**last, "content": joined(last["content"], message["content"])}
        else:
            found.append(message)
    return found


async def encode_text(served: ServedModel, text: str) -> list[int]:
    """Token ids of a text. Raises `APIError`."""
    return await _encode(len(text), lambda: served.llm.tokenizer.encode(text))


async def _encode(size: int, encode: Callable[[], list[int]]) -> list[int]:
    try:
        return encode() if size < _LONG_TEXT else await asyncio.to_thread(encode)
    except MLXInferError as error:
        raise from_engine_error(error) from error


async def stream(context: RequestContext, request: GenerateRequest, render: Callable[[list[Chunk]], bytes]) -> AsyncGenerator[bytes, None]:
    """All `n` answers as bytes. `render` gets the chunks that the engine hands over together, as soon as they arrive.

    Closing the generator cancels the request before the engine's next step. Raises `APIError`.
    """
    metrics = begin(context, request.served)
    _log_prompt(context, request)
    unfinished = request.params.n
    try:
        async with aclosing(request.served.llm.bursts(request.prompt, request.params, **_options(context, request))) as bursts:
            async for chunks in bursts:
                metrics.burst(chunks)
                for chunk in chunks:
                    if chunk.finish_reason:
                        unfinished -= 1
                        _log_end(context, chunk.finish_reason, chunk.usage, chunk.index)
                yield render([_without_cache_hits(context, chunk) for chunk in chunks] if context.shared_key else chunks)
    except MLXInferError as error:
        raise _engine_error(error, request) from error
    finally:
        _end(context, metrics, finished=not unfinished)


async def complete(context: RequestContext, request: GenerateRequest) -> list[Completion]:
    """All `n` answers, complete. Raises `APIError`."""
    metrics = begin(context, request.served)
    _log_prompt(context, request)
    completions: list[Completion] = []
    try:
        completions = await request.served.llm.generate([request.prompt], request.params, **_options(context, request))
        for completion in completions:
            metrics.completion(completion)
            _log_end(context, completion.finish_reason, completion.usage, completion.index)
        return [_without_cache_hits(context, completion) for completion in completions]
    except MLXInferError as error:
        raise _engine_error(error, request) from error
    finally:
        _end(context, metrics, finished=bool(completions))


_Answer = TypeVar("_Answer", Chunk, Completion)


def _without_cache_hits(context: RequestContext, part: _Answer) -> _Answer:
    """The answer without the number of cached tokens and without the times of images, if the client's key may be shared. They reveal
    whether another user has sent the same text or image."""
    if not context.shared_key or part.usage is None or not (part.usage.stats.reused_tokens or part.usage.stats.images):
        return part
    hidden = replace(part.usage.stats, reused_tokens=0, images_cached=0, image_encode_s=0.0, image_decode_s=0.0)
    return replace(part, usage=replace(part.usage, stats=hidden))


def _engine_error(error: MLXInferError, request: GenerateRequest) -> APIError:
    """The error response, with the names of the request's own fields."""
    if isinstance(error, SamplingError):
        return structure_refused(error, request.structure_field)
    if isinstance(error, PromptError) and not isinstance(request.prompt, list):
        return schema_refused(error, request.prompt.tools)
    return from_engine_error(error)


async def score(context: RequestContext, request: GenerateRequest, top: int) -> list[TokenLogprob]:
    """The log-probability of each prompt token from the second on, with the `top` most likely alternatives. Raises `APIError`."""
    context.log["model"] = request.served.name
    try:
        return await request.served.llm.score(request.token_ids, top, **_options(context, request))
    except MLXInferError as error:
        raise from_engine_error(error) from error


def options(context: RequestContext, served: ServedModel, client_id: str, cache_salt: str = "") -> RequestKeywords:
    """Keyword arguments of the engine for a request, besides its prompt."""
    return {"client_id": context.client_id(client_id), "timeout_s": context.left_s, "adapter": served.adapter, "cache_salt": cache_salt}


def _options(context: RequestContext, request: GenerateRequest) -> RequestKeywords:
    return options(context, request.served, request.client_id, request.cache_salt)


def begin(context: RequestContext, served: ServedModel) -> RequestMetrics:
    """Metrics of a request that starts now. Adds its model to the access log."""
    context.log["model"] = served.name
    return context.server.metrics.begin(served.base)


def _end(context: RequestContext, metrics: RequestMetrics, *, finished: bool) -> None:
    metrics.end(finished)
    if metrics.first_s is not None:
        context.log.setdefault("first_token_ms", round(metrics.first_s * 1000, 1))


def _log_prompt(context: RequestContext, request: GenerateRequest) -> None:
    """Add the prompt's tokens to the access log at once: a client may disconnect before the first chunk."""
    context.log["prompt_tokens"] = context.log.get("prompt_tokens", 0) + len(request.token_ids)


def _log_end(context: RequestContext, reason: FinishReason, usage: Usage | None, index: int) -> None:
    """Add an answer to the access log. Raises `APIError` if it was cut off."""
    if reason == "timeout":
        raise timed_out(context.limits.request_s)
    if reason == "cancelled":
        raise stopping()
    log = context.log
    log["finish_reason"] = reason
    if usage is None:
        return
    if index == 0:
        log["cached_tokens"] = log.get("cached_tokens", 0) + usage.stats.reused_tokens
        _log_images(log, usage)
    log["completion_tokens"] = log.get("completion_tokens", 0) + usage.completion_tokens


def _log_images(log: dict[str, Any], usage: Usage) -> None:
    """Add counts and times of the prompt's images to the access log."""
    stats = usage.stats
    if stats.images:
        log["image_tokens"], log["images_cached"] = stats.image_tokens, stats.images_cached
        log["image_decode_ms"], log["image_encode_ms"] = (round(s * 1000, 1) for s in (stats.image_decode_s, stats.image_encode_s))


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines that run concurrently. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


def merged(streams: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """Pieces of several streams in order of arrival. The first failure closes all streams; so does closing the result."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_BUFFERED)
    tasks = [asyncio.ensure_future(_feed(stream, queue)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _feed(stream: AsyncGenerator[bytes, None], queue: asyncio.Queue[bytes | Exception | None]) -> None:
    """Put the stream's pieces into the queue, then None or the error that ended it."""
    try:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                await queue.put(piece)
    except Exception as error:
        await queue.put(error)
        raise
    await queue.put(None)


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
