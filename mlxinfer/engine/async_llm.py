"""The front door for asyncio: many tasks ask, one thread computes."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx
import numpy as np

from ..config import EngineArgs
from ..errors import DeadlineError, MLXInferError
from ..loading.load import LoadedModel
from ..types import Chunk, Completion, EngineStats, SamplingParams, TokenLogprob
from .adapter_set import load_into
from .client.async_request import Piece, Request
from .client.engine_thread import EngineThread, Progress
from .core.sequence import Sequence
from .model_base import ModelBase, check_process, prompt_logprobs
from .open_model import OpenModel
from .request_keywords import ChatKeywords, ChatRequestKeywords, GenerateKeywords, RequestKeywords, RequestOptions, chatting, generating
from .text.chat_prompt import ChatPrompt
from .text.embedding import Embedder, check_texts
from .text.hooks import Tracing
from .text.input_processor import AnyPrompt, InputProcessor, Messages, PreparedPrompt, Prompt, as_prompts
from .text.output_processor import FEED, check_unbroken
from .text.reranking import Pair, Ranked, check_pairs, ranked, score_pairs, scorer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache.disk.kv_export import KVExport
    from ..cache.kv_events import KVEventSink
    from ..interpret.places import Layers
    from ..interpret.trace import Trace
    from ..output_format.format import OutputFormat

Result = TypeVar("Result")
_COMPILING = ThreadPoolExecutor(2, "mlxinfer structures")
"""Threads that check and compile grammars. Slow grammars wait for one another, and delay no other request."""
_SHORT = 2000
"""Characters or token ids that are prepared in the event loop: another thread would take longer."""
Preparing = Callable[[InputProcessor], Awaitable[PreparedPrompt]]


class AsyncLLM(ModelBase):
    """A model shared by any number of asyncio tasks, on any event loop or thread.

        async with AsyncLLM("smollm2") as llm:
            async for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=20)):
                print(chunk.text, end="")

    It has the methods and properties of `LLM`, and every request takes what `LLM`'s take. One thread of its own loads the model, which
    `ready` waits for, and computes; properties raise `MLXInferError` before. Cancelling a task, or closing a stream, ends its request
    before the next step. If the engine fails, requests under way get `EngineError`, and it starts again, once an
    hour.
    """

    def _start(self, args: EngineArgs, progress: Progress | None) -> None:
        self._thread = EngineThread(partial(OpenModel.open, args), progress)
        weakref.finalize(self, self._thread.close).atexit = False  # at the interpreter's end the thread is waited for as well

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises the `MLXInferError` that it could not be loaded for."""
        await self._opened()

    def prepare_structures(self) -> None:
        """Begin to prepare the vocabulary for structured answers and tools, in another thread: 0.5 s of a processor for 49,000 tokens and
        2.5 s for 262,000, which the first request that needs it would take otherwise. The model must be `ready`."""
        Thread(target=self._now.inputs.grammars.prepare, name="mlxinfer vocabulary", daemon=True).start()

    @property
    def _described(self) -> OpenModel:
        return self._now

    @property
    def loaded(self) -> LoadedModel:
        """The model itself, with its summary and files; only its own thread may compute with it."""
        return self._now.loaded

    @property
    def output_format(self) -> OutputFormat:
        """How the model writes reasoning and calls in chats."""
        return self._now.inputs.output_format

    @property
    def ended(self) -> bool:
        """Whether it was closed, or failed for good: nothing runs any more."""
        return self._thread.ended.done()

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """As `LLM.load_adapter`, next to requests that run."""
        opened = await self._opened()
        await asyncio.to_thread(load_into, opened.adapters, name, path, self._thread.change_adapters)

    async def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`."""
        opened = await self._opened()
        await asyncio.to_thread(self._thread.change_adapters, partial(opened.adapters.unload, name))

    @property
    def end(self) -> Future[None]:
        """Done once nothing runs any more."""
        return self._thread.ended

    def stats(self) -> EngineStats:
        """What all requests took so far, and what there is now, at most a few steps ago."""
        return self._thread.stats

    def send_kv_events(self, sink: KVEventSink) -> None:
        """Have `sink` called with what the prefix cache holds, then with every change: `BlockStored`, `BlockRemoved` and `AllBlocksCleared`
        (`mlxinfer.cache.kv_events`), in their order, from several threads. It must return at once. For routers: docs/routers.md."""
        self._thread.send_kv_events(sink)

    async def hand_out(self, function: Callable[[KVExport], Result]) -> Result:
        """Call a function between two steps, with what gives pages of the prefix cache to other machines. Raises `SettingError` where the
        model was not opened with `kv_producer`."""
        await self._opened()
        return await asyncio.to_thread(self._thread.hand_out, function)

    async def generate(
        self,
        prompts: AnyPrompt | Many[AnyPrompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]:
        """Answers to one prompt or any number of them, as `LLM.generate`: a list with `n` completions for each prompt, in order. Raises
        `MLXInferError`s."""
        return await self._generate(prompts, *generating("generate", params, options))

    def stream(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """The `n` answers in pieces, of which `Chunk.index` tells whose they are; the last piece of each has its `finish_reason`. Raises
        `MLXInferError`s, also in the middle of an answer."""
        return _flat(self._bursts(partial(_sequences, partial(_prompt, prompt), *generating("stream", params, options))))

    def bursts(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[list[Chunk], None]:
        """`stream`, with those pieces in one list that came together: for programs that pass them on."""
        return self._bursts(partial(_sequences, partial(_prompt, prompt), *generating("bursts", params, options)))

    async def chat_prompt(self, messages: Messages, **chat: Unpack[ChatKeywords]) -> ChatPrompt:
        """The prompt that `chat` would use, for `generate` and `stream`, as `LLM.chat_prompt`."""
        return await _chat(messages, chat, (await self._opened()).inputs)

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatRequestKeywords]) -> Completion:
        """The assistant's next turn, one `Completion` (the first, if `n` is above 1). Takes `tools`, `tool_choice`, `parallel_tool_calls`,
        `template_vars` and the keywords of `generate`, as `LLM.chat` does."""
        chat, params, terms = chatting("chat", params, options)
        return (await self._generate([await _chat(messages, chat, (await self._opened()).inputs)], params, terms))[0]

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatRequestKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """`chat` in pieces, like those of `stream`. Takes the keywords of `chat`."""
        chat, params, terms = chatting("stream_chat", params, options)
        return _flat(self._bursts(partial(_sequences, partial(_chat, messages, chat), params, terms)))

    async def score(self, prompt: Prompt, top: int = 0, **options: Unpack[RequestKeywords]) -> list[TokenLogprob]:
        """How likely each token of a prompt is, from the second on, and what the `top` likeliest (0 to 64) would have been. Raises
        `MLXInferError`s, and `DeadlineError` after `timeout_s`."""
        terms = RequestOptions.of("score", options)
        async with aclosing(self._bursts(partial(_scored, prompt, top, terms))) as bursts:
            return prompt_logprobs([chunk async for burst in bursts for chunk in burst], terms.timeout_s)

    async def logits(self, token_ids: Prompt, **options: Unpack[RequestKeywords]) -> mx.array:
        """float32 `[T, vocab]`, evaluated: after each token, the logits of the next, computed by the cache and step that generate."""
        terms = RequestOptions.of("logits", options)
        sequences = await _scored(token_ids, None, terms, (await self._opened()).inputs)
        (logits,) = await self._whole(Request(sequences, streams=False, wants_logits=True))
        assert isinstance(logits, mx.array)
        return logits

    async def embedding_ids(
        self,
        texts: Prompt | Many[Prompt],
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
    ) -> list[list[int]]:
        """The token ids that `embed` computes, for whoever wants to count them first; `embed` takes them as they are."""
        check_texts(texts)
        embedder = Embedder.of(await self._opened())
        make = partial(embedder.token_ids, texts, embedder.prompt(prompt_name, input_type), truncate=truncate)
        return await _prepared(sum(map(_size, as_prompts(texts))), make)

    async def embed(
        self,
        texts: Prompt | Many[Prompt],
        dimensions: int | None = None,
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> np.ndarray:
        """Vectors of texts, numpy float32 `[n, d]`, as `LLM.embed`."""
        terms, embedder = RequestOptions.of("embed", options), Embedder.of(await self._opened())
        embedder.check_dimensions(dimensions)
        ids = await self.embedding_ids(texts, prompt_name=prompt_name, input_type=input_type, truncate=truncate)
        vectors = await self._pool([embedder.sequences(ids, terms)], terms)
        return await _prepared(_SHORT * bool(embedder.recipe.dense) + len(ids), partial(embedder.finish, vectors, dimensions))

    async def rerank(
        self,
        query: str,
        documents: Many[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Ranked]:
        """The most relevant documents, as `LLM.rerank`."""
        pairs = [(query, document) for document in documents]
        return ranked(await self.relevance(pairs, instruction=instruction, **options), documents, top_n)

    async def relevance(self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]) -> np.ndarray:
        """`[n]`, as `LLM.relevance`."""
        return (await self.counted_relevance(pairs, instruction=instruction, **options))[0]

    async def counted_relevance(
        self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]
    ) -> tuple[np.ndarray, int]:
        """`relevance`, and how many tokens the pairs had."""
        check_pairs(pairs)
        terms, how = RequestOptions.of("relevance", options), scorer(await self._opened())
        ids = await _prepared(sum(len(a) + len(b) for a, b in pairs), partial(how.token_ids, pairs, instruction))
        vectors = await self._pool(how.waves(ids, terms), terms)
        return score_pairs(how, pairs, vectors), sum(map(len, ids))

    async def _pool(self, waves: list[list[Sequence]], terms: RequestOptions) -> list[np.ndarray]:
        free = asyncio.Semaphore(FEED * (await self._opened()).config.max_num_seqs)

        async def one(sequence: Sequence) -> np.ndarray:
            async with free:
                vector = await self._vector(sequence)
            if vector is None:
                raise DeadlineError(f"the texts were not read within {terms.timeout_s:g} s")
            return vector

        vectors: list[np.ndarray] = []
        for wave in waves:
            tasks = [asyncio.ensure_future(one(sequence)) for sequence in wave]
            try:
                vectors += await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return vectors

    async def trace(
        self,
        prompt: Prompt,
        layers: Layers = None,
        what: str | Iterable[str] = ("residual", "attention", "mlp", "logits"),
        **options: Unpack[RequestKeywords],
    ) -> Trace:
        """What the model computes for a prompt, as `LLM.trace`. What is computed from a trace later, such as its logit lens, waits for the
        engine's thread."""
        terms, opened = RequestOptions.of("trace", options), await self._opened()
        ids = await _prepared(_size(prompt), partial(opened.inputs.scored_ids, prompt))
        tracing = Tracing.of(opened.loaded.model, what, layers, ids)
        (logits,) = await self._whole(Request([opened.inputs.scored(ids, None, terms, tracing.hooks)], streams=False, wants_logits=True))
        assert isinstance(logits, mx.array)
        return await asyncio.to_thread(tracing.result, opened.loaded, ids, logits, self._thread.compute)

    async def close(self) -> None:
        """Give the memory back. Requests under way and later ones get `EngineError`."""
        self._thread.close()
        if self._thread.process != os.getpid():  # the thread that would end is missing in a forked child
            return
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
        check_process()
        opened = self._thread.opened
        return opened.result() if opened.done() else await asyncio.wrap_future(opened)

    async def _generate(
        self, prompts: AnyPrompt | Many[AnyPrompt], params: SamplingParams | Many[SamplingParams] | None, terms: RequestOptions
    ) -> list[Completion]:
        opened = await self._opened()
        items = as_prompts(prompts)
        each = opened.inputs.all_params(params, len(items))
        found = await _prepared(sum(map(_size, items)), partial(_all_prepared, opened.inputs, items))
        free = asyncio.Semaphore(FEED * opened.config.max_num_seqs)
        requests = [await _described(opened.inputs, prompt, one, terms) for prompt, one in zip(found, each, strict=True)]
        tasks = [asyncio.ensure_future(self._complete(sequences, free)) for sequences in requests]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [completion for answer in answers for completion in answer]

    async def _bursts(self, sequences: Callable[[InputProcessor], Awaitable[list[Sequence]]]) -> AsyncGenerator[list[Chunk], None]:
        """The iterator over a request: closing it ends the request before the next step."""
        request = Request(await sequences((await self._opened()).inputs), streams=True)
        running = len(request.sequences)
        self._thread.send(request)
        try:
            while running:
                burst = [piece for piece in await request.next() if isinstance(piece, Chunk)]
                running -= sum(chunk.finish_reason is not None for chunk in burst)
                yield burst
            check_unbroken(request.sequences)
        finally:
            self._thread.cancel(request)

    async def _complete(self, sequences: list[Sequence], free: asyncio.Semaphore) -> list[Completion]:
        async with free:
            found = [piece for piece in await self._whole(Request(sequences, streams=False)) if isinstance(piece, Completion)]
        return sorted(found, key=lambda completion: completion.index)

    async def _vector(self, sequence: Sequence) -> np.ndarray | None:
        (vector,) = await self._whole(Request([sequence], streams=False))
        return vector if isinstance(vector, np.ndarray) else None

    async def _whole(self, request: Request) -> list[Piece]:
        """What a request that does not stream brings, a piece for each of its sequences."""
        self._thread.send(request)
        try:
            found: list[Piece] = []
            while len(found) < len(request.sequences):
                found += await request.next()
            check_unbroken(request.sequences)
        finally:
            self._thread.cancel(request)
        return found


async def _flat(bursts: AsyncGenerator[list[Chunk], None]) -> AsyncGenerator[Chunk, None]:
    async with aclosing(bursts):
        async for burst in bursts:
            for chunk in burst:
                yield chunk


async def _prompt(prompt: AnyPrompt, inputs: InputProcessor) -> PreparedPrompt:
    return await _prepared(_size(prompt), partial(inputs.prepared, prompt))


async def _chat(messages: Messages, chat: ChatKeywords, inputs: InputProcessor) -> ChatPrompt:
    return await asyncio.to_thread(partial(inputs.chat, messages, **chat))


async def _sequences(prompt: Preparing, params: SamplingParams | None, terms: RequestOptions, inputs: InputProcessor) -> list[Sequence]:
    return await _described(inputs, await prompt(inputs), params, terms)


async def _described(
    inputs: InputProcessor, prompt: PreparedPrompt, params: SamplingParams | None, terms: RequestOptions
) -> list[Sequence]:
    """Compiling a grammar takes a while, but lets the event loop go on if it happens in another thread."""
    holds = (isinstance(prompt, ChatPrompt) and prompt.tools) or (params is not None and params.structure is not None)
    if not holds:
        return inputs.sequences(prompt, params, terms)
    return await asyncio.get_running_loop().run_in_executor(_COMPILING, inputs.sequences, prompt, params, terms)


async def _scored(prompt: Prompt, top: int | None, terms: RequestOptions, inputs: InputProcessor) -> list[Sequence]:
    return [inputs.scored(await _prepared(_size(prompt), partial(inputs.scored_ids, prompt)), top, terms)]


def _all_prepared(inputs: InputProcessor, prompts: list[AnyPrompt]) -> list[PreparedPrompt]:
    return [inputs.prepared(prompt) for prompt in prompts]


def _size(prompt: AnyPrompt) -> int:
    """Length in characters or token ids."""
    return len(prompt) if hasattr(prompt, "__len__") else 0


async def _prepared(size: int, prepare: Callable[[], Result]) -> Result:
    """Prepare short input here and long input in another thread, so that the event loop continues."""
    return prepare() if size <= _SHORT else await asyncio.to_thread(prepare)
