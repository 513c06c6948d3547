"""The front door for asyncio: many tasks ask, one thread computes."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Many
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ..errors import DeadlineError, EngineError, MLXInferError
from ..loading.load import LoadedModel
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk, Completion, EngineStats, SamplingParams, TokenLogprob
from .engine_thread import EngineThread, Progress, Request
from .input_processor import InputProcessor, Messages, Prompt, RequestOptions, as_prompts
from .output_processor import FEED
from .sequence import Sequence
from .settings import OpenModel, Settings

Result = TypeVar("Result")

_SHORT = 2000
"""Characters or token ids that are prepared where they are: going through another thread would take longer."""


class AsyncLLM:
    """A model that answers the tasks of event loops, as many as there are, in any thread.

        async with AsyncLLM("smollm2") as llm:
            async for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=20)):
                print(chunk.text, end="")

    Takes what `LLM` takes. One thread of its own loads the model, which `ready` waits for, and computes. Cancelling a task, or closing a
    stream, ends its request before the next step. If the engine fails, requests under way get `EngineError`, and it starts again, once.
    """

    def __init__(
        self, path_or_id: str | Path, dtype: str | None = None, kv: str = "16", *, progress: Progress | None = None, **settings: Any
    ) -> None:
        """`progress` is called in the thread."""
        self._start(partial(OpenModel.open, Settings(path_or_id, dtype, kv, **settings)), progress)

    def _start(self, open_model: Callable[[Progress], OpenModel], progress: Progress | None) -> None:
        self._thread = EngineThread(open_model, progress)
        weakref.finalize(self, self._thread.close).atexit = False  # at the interpreter's end the thread is waited for as well

    async def ready(self) -> None:
        """Until the model is loaded. Raises the `MLXInferError` that it could not be loaded for."""
        await self._opened()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._now.loaded.tokenizer

    @property
    def name(self) -> str:
        return self._now.loaded.name

    @property
    def loaded(self) -> LoadedModel:
        """What is known of the model; nobody but its own thread may compute with it."""
        return self._now.loaded

    @property
    def memory_bytes(self) -> int:
        """What the weights, the cache and a step take."""
        opened = self._now
        return opened.plan.used if opened.plan else opened.loaded.weight_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told."""
        return self._now.notes

    @property
    def max_context(self) -> int:
        return self._now.config.max_context

    @property
    def default_params(self) -> SamplingParams:
        return self._now.intake.default_params

    @property
    def ended(self) -> bool:
        """Whether it was closed, or failed for good: nothing runs any more."""
        return self._thread.ended.done()

    def stats(self) -> EngineStats:
        """What all requests took so far, and what there is now, at most a few steps ago."""
        return self._thread.stats

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """The `n` answers in pieces, of which `Chunk.index` tells whose they are; the last piece of each has its `finish_reason`. Raises
        `MLXInferError`s, also in the middle of an answer."""
        return self._stream(partial(_ids, prompt), params, RequestOptions.of(client_id, priority, timeout_s))

    def bursts(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[list[Chunk], None]:
        """`stream`, with the pieces together that came together: for who passes them on."""
        return self._bursts(partial(_sequences, partial(_ids, prompt), params, RequestOptions.of(client_id, priority, timeout_s)))

    async def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | None = None,
        *,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Answers to one prompt or any number of them: `n` completions for each prompt, in order. Raises `MLXInferError`s."""
        terms = RequestOptions.of(client_id, priority, timeout_s)
        opened = await self._opened()
        items = as_prompts(prompts)
        all_ids = await _prepared(sum(map(len, items)), partial(_all_ids, opened.intake, items))
        free = asyncio.Semaphore(FEED * opened.config.max_sequences)
        requests = [opened.intake.sequences(ids, params, terms) for ids in all_ids]
        tasks = [asyncio.ensure_future(self._complete(sequences, free)) for sequences in requests]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [completion for answer in answers for completion in answer]

    async def score(
        self, prompt: Prompt, top: int = 0, *, client_id: str = "", priority: int = 0, timeout_s: float | None = None
    ) -> list[TokenLogprob]:
        """How likely each token of a prompt is, from the second on, and what the `top` likeliest would have been. Raises
        `MLXInferError`s."""
        terms = RequestOptions.of(client_id, priority, timeout_s)

        async def scored(intake: InputProcessor) -> list[Sequence]:
            return [intake.scored(await _prepared(len(prompt), partial(intake.scored_ids, prompt)), top, terms)]

        found: list[TokenLogprob] = []
        reason = None
        async with aclosing(self._bursts(scored)) as bursts:
            async for burst in bursts:
                for chunk in burst:
                    found += chunk.prompt_logprobs or ()
                    reason = chunk.finish_reason
        if reason == "timeout":
            raise DeadlineError(f"the prompt was not read within {timeout_s:g} s")
        if reason != "stop":
            raise EngineError(f"the prompt was not read to its end: {reason}")
        return found

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **template_vars: Any,
    ) -> Completion:
        """The assistant's next turn. `messages` are dicts with `role` and `content`, rendered by the model's own chat template."""
        ids = await _chat_ids(messages, tools, template_vars, (await self._opened()).intake)
        return (await self.generate([ids], params, client_id=client_id, priority=priority, timeout_s=timeout_s))[0]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **template_vars: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """`chat` in pieces."""
        ids = partial(_chat_ids, messages, tools, template_vars)
        return self._stream(ids, params, RequestOptions.of(client_id, priority, timeout_s))

    async def close(self) -> None:
        """Give the memory back. Requests under way and later ones get `EngineError`."""
        self._thread.close()
        await asyncio.wrap_future(self._thread.ended)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.ready()
        except BaseException:
            self._thread.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def _now(self) -> OpenModel:
        if not self._thread.opened.done():
            raise MLXInferError("the model is being loaded: await ready() first")
        return self._thread.opened.result()

    async def _opened(self) -> OpenModel:
        opened = self._thread.opened
        return opened.result() if opened.done() else await asyncio.wrap_future(opened)

    async def _stream(
        self, token_ids: Callable[[InputProcessor], Awaitable[list[int]]], params: SamplingParams | None, terms: RequestOptions
    ) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._bursts(partial(_sequences, token_ids, params, terms))) as bursts:
            async for burst in bursts:
                for chunk in burst:
                    yield chunk

    async def _bursts(self, sequences: Callable[[InputProcessor], Awaitable[list[Sequence]]]) -> AsyncGenerator[list[Chunk], None]:
        """The one iterator over a request: closing it ends the request before the next step."""
        request = Request(await sequences((await self._opened()).intake), streams=True)
        running = len(request.sequences)
        self._thread.send(request)
        try:
            while running:
                burst = [piece for piece in await request.next() if isinstance(piece, Chunk)]
                running -= sum(chunk.finish_reason is not None for chunk in burst)
                yield burst
        finally:
            self._thread.cancel(request)

    async def _complete(self, sequences: list[Sequence], free: asyncio.Semaphore) -> list[Completion]:
        async with free:
            request = Request(sequences, streams=False)
            self._thread.send(request)
            try:
                found: list[Completion] = []
                while len(found) < len(sequences):
                    found += (piece for piece in await request.next() if isinstance(piece, Completion))
            finally:
                self._thread.cancel(request)
        return sorted(found, key=lambda completion: completion.index)


async def _ids(prompt: Prompt, intake: InputProcessor) -> list[int]:
    return await _prepared(len(prompt), partial(intake.token_ids, prompt))


async def _sequences(
    token_ids: Callable[[InputProcessor], Awaitable[list[int]]],
    params: SamplingParams | None,
    terms: RequestOptions,
    intake: InputProcessor,
) -> list[Sequence]:
    return intake.sequences(await token_ids(intake), params, terms)


async def _chat_ids(
    messages: Messages, tools: Many[Mapping[str, Any]] | None, template_vars: Mapping[str, Any], intake: InputProcessor
) -> list[int]:
    return await asyncio.to_thread(intake.chat_ids, messages, tools, template_vars)


def _all_ids(intake: InputProcessor, prompts: list[Prompt]) -> list[list[int]]:
    return [intake.token_ids(prompt) for prompt in prompts]


async def _prepared(size: int, prepare: Callable[[], Result]) -> Result:
    """What takes long is done in another thread, so that the loop goes on."""
    return prepare() if size <= _SHORT else await asyncio.to_thread(prepare)
