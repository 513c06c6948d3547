"""`AsyncLLM`: a model for asyncio, whose engine runs in one thread."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, nullcontext
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
from ..util.progress_bar import answers_bar
from .adapter_set import load_into
from .client.async_request import Piece, Request
from .client.engine_thread import EngineThread, Progress
from .core.sequence import Sequence
from .model_base import ModelBase, check_process, prompt_logprobs
from .open_model import OpenModel
from .request_keywords import ChatKeywords, ChatRequestKeywords, GenerateKeywords, RequestKeywords, RequestOptions, chatting, generating
from .text.chat_prompt import ChatPrompt
from .text.embedding import Embedder, check_texts
from .text.hooks import Tracing, load_trace
from .text.input_processor import AnyPrompt, InputProcessor, PreparedPrompt, Prompt, as_prompts
from .text.message_parts import Messages
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
"""Threads that check and compile grammars. Slow grammars delay one another and no other request."""
_SHORT = 2000
"""Characters or token ids that are prepared in the event loop: another thread would take longer."""
Preparing = Callable[[InputProcessor], Awaitable[PreparedPrompt]]


class AsyncLLM(ModelBase):
    """A model shared by any number of asyncio tasks, on any event loop or thread.

        async with AsyncLLM("smollm2") as llm:
            async for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=20)):
                print(chunk.text, end="")

    It has the methods and properties of `LLM`, with the same arguments. Its own thread loads the model and computes. `ready` waits for the
    model; properties raise `MLXInferError` before. Cancelling a task, or closing a stream, ends its request before the next step. If the
    engine fails, running requests raise `EngineError`, and the engine restarts, once an hour.
    """

    def _start(self, args: EngineArgs, progress: Progress | None) -> None:
        self._thread = EngineThread(partial(OpenModel.open, args), progress)
        weakref.finalize(self, self._thread.close).atexit = False  # at its end the interpreter waits for the thread as well

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises the `MLXInferError` of a failed load."""
        await self._opened()

    def prepare_structures(self) -> None:
        """Start preparing the vocabulary for structured answers and tools, in another thread. Otherwise the first such request does it:
        0.5 s of a processor for 49,000 tokens, 2.5 s for 262,000. The model must be `ready`."""
        Thread(target=self._opened_now.inputs.grammars.prepare, name="mlxinfer vocabulary", daemon=True).start()

    @property
    def _described(self) -> OpenModel:
        return self._opened_now

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model, with its summary and files. Only the engine's thread may compute with it."""
        return self._opened_now.loaded

    @property
    def output_format(self) -> OutputFormat:
        """The model's format of reasoning and calls in chats."""
        return self._opened_now.inputs.output_format

    @property
    def ended(self) -> bool:
        """True after `close`, or if the engine failed for good."""
        return self._thread.ended.done()

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """See `LLM.load_adapter`. Requests continue meanwhile."""
        opened = await self._opened()
        await asyncio.to_thread(load_into, opened.adapters, name, path, self._thread.change_adapters)

    async def unload_adapter(self, name: str) -> None:
        """See `LLM.unload_adapter`."""
        opened = await self._opened()
        await asyncio.to_thread(self._thread.change_adapters, partial(opened.adapters.unload, name))

    async def shrink_experts(self, nbytes: int) -> int:
        """Free up to `nbytes` of the memory of experts for another model, between two steps. Returns the bytes that are free.

        The pools of experts grow again while memory is left.
        """
        await self._opened()
        return await asyncio.to_thread(self._thread.shrink_experts, nbytes)

    @property
    def spare_expert_bytes(self) -> int:
        """Bytes of the pools of experts that `shrink_experts` can free; 0 if all experts are resident."""
        guard = self._opened_now.guard
        return 0 if guard is None else guard.can_give

    @property
    def end(self) -> Future[None]:
        """Done once the engine's thread has ended."""
        return self._thread.ended

    def stats(self) -> EngineStats:
        """Totals of all requests so far, and the state at most a few steps ago."""
        return self._thread.stats

    def send_kv_events(self, sink: KVEventSink) -> None:
        """Call `sink` with the contents of the prefix cache, then with every change: `BlockStored`, `BlockRemoved` and `AllBlocksCleared`
        (`mlxinfer.cache.kv_events`), in order, from several threads. It must return at once. For routers: docs/routers.md."""
        self._thread.send_kv_events(sink)

    async def hand_out(self, function: Callable[[KVExport], Result]) -> Result:
        """Call a function between two steps, with the exporter of the prefix cache's pages. Raises `SettingError` for a model without
        `kv_producer`."""
        await self._opened()
        return await asyncio.to_thread(self._thread.hand_out, function)

    async def generate(
        self,
        prompts: AnyPrompt | Many[AnyPrompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]:
        """Answers to one or any number of prompts, as `LLM.generate`: a list with `n` completions for each prompt, in order. `progress`
        shows a bar in a terminal or notebook. Raises `MLXInferError`s."""
        return await self._generate(prompts, *generating("generate", params, options), progress=progress)

    def stream(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[Chunk, None]:
        """The `n` answers in pieces; `Chunk.index` is the answer's index, and the last piece of each has its `finish_reason`. Raises
        `MLXInferError`s, also during an answer."""
        return _flat(self._bursts(partial(_sequences, partial(_prompt, prompt), *generating("stream", params, options))))

    def bursts(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[list[Chunk], None]:
        """`stream`, with all available pieces in one list, for programs that forward them."""
        return self._bursts(partial(_sequences, partial(_prompt, prompt), *generating("bursts", params, options)))

    async def chat_prompt(self, messages: Messages, **chat: Unpack[ChatKeywords]) -> ChatPrompt:
        """The prompt that `chat` would use, for `generate` and `stream`, as `LLM.chat_prompt`."""
        return await _chat(messages, chat, (await self._opened()).inputs)

    async def count_tokens(self, messages: Messages, **chat: Unpack[ChatKeywords]) -> int:
        """Tokens of the prompt that `chat` would use, as `LLM.count_tokens`."""
        opened = await self._opened()
        return len((await asyncio.to_thread(partial(opened.inputs.rendered, messages, **chat))).prompt.token_ids)

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
        """Log-probabilities of a prompt's tokens from the second on, each with the `top` likeliest (0 to 64). Raises `MLXInferError`s, such
        as `DeadlineError` after `timeout_s`."""
        terms = RequestOptions.of("score", options)
        async with aclosing(self._bursts(partial(_scored, prompt, top, terms))) as bursts:
            return prompt_logprobs([chunk async for burst in bursts for chunk in burst], terms.timeout_s)

    async def logits(self, token_ids: Prompt, **options: Unpack[RequestKeywords]) -> mx.array:
        """Logits of the next token after each token, float32 `[T, vocab]`, evaluated, by the same cache and steps as in `generate`."""
        terms = RequestOptions.of("logits", options)
        sequences = await _scored(token_ids, None, terms, (await self._opened()).inputs)
        (logits,) = await self._results(Request(sequences, streams=False, wants_logits=True))
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
        """The token ids of texts, to count them before `embed`, which accepts them unchanged."""
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
        """(`relevance`, number of tokens of the pairs)."""
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
        prompt: AnyPrompt,
        layers: Layers = None,
        what: str | Iterable[str] = ("residual", "attention", "mlp", "logits"),
        **options: Unpack[RequestKeywords],
    ) -> Trace:
        """Activations of a prompt, as `LLM.trace`. Later computations from the trace, such as its logit lens, wait for the engine's
        thread."""
        terms, opened = RequestOptions.of("trace", options), await self._opened()
        ids, images = await _prepared(_size(prompt), partial(opened.inputs.traced, prompt))
        tracing = Tracing.of(opened.loaded.model, what, layers, ids)
        scored = opened.inputs.scored(ids, None, terms, tracing.hooks, images)
        (logits,) = await self._results(Request([scored], streams=False, wants_logits=True))
        assert isinstance(logits, mx.array)
        return await asyncio.to_thread(tracing.result, opened.loaded, ids, logits, self._thread.compute, images)

    async def load_trace(self, path: str | Path) -> Trace:
        """Read a trace of this model, as `LLM.load_trace`."""
        return await asyncio.to_thread(load_trace, Path(path), (await self._opened()).loaded, self._thread.compute)

    async def close(self) -> None:
        """Free the memory. Running and later requests raise `EngineError`."""
        self._thread.close()
        if self._thread.process != os.getpid():  # a forked child has no thread that could end
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
    def _opened_now(self) -> OpenModel:
        if not self._thread.opened.done():
            raise MLXInferError("the model is being loaded: await ready() first")
        return self._thread.opened.result()

    async def _opened(self) -> OpenModel:
        check_process()
        opened = self._thread.opened
        return opened.result() if opened.done() else await asyncio.wrap_future(opened)

    async def _generate(
        self,
        prompts: AnyPrompt | Many[AnyPrompt],
        params: SamplingParams | Many[SamplingParams] | None,
        terms: RequestOptions,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        opened = await self._opened()
        items = as_prompts(prompts)
        each = opened.inputs.all_params(params, len(items))
        found = await _prepared(sum(map(_size, items)), partial(_all_prepared, opened.inputs, items))
        free = asyncio.Semaphore(FEED * opened.config.max_num_seqs)
        requests = [await _make_sequences(opened.inputs, prompt, one, terms) for prompt, one in zip(found, each, strict=True)]
        tasks = [asyncio.ensure_future(self._complete(sequences, free)) for sequences in requests]
        try:
            with answers_bar(len(tasks)) if progress else nullcontext() as show:
                for task in tasks if show else ():
                    task.add_done_callback(lambda _: show(sum(each.done() for each in tasks)))  # type: ignore[misc]
                answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [completion for answer in answers for completion in answer]

    async def _bursts(self, sequences: Callable[[InputProcessor], Awaitable[list[Sequence]]]) -> AsyncGenerator[list[Chunk], None]:
        """Iterate over a request. Closing the iterator ends the request before the next step."""
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
            found = [piece for piece in await self._results(Request(sequences, streams=False)) if isinstance(piece, Completion)]
        return sorted(found, key=lambda completion: completion.index)

    async def _vector(self, sequence: Sequence) -> np.ndarray | None:
        (vector,) = await self._results(Request([sequence], streams=False))
        return vector if isinstance(vector, np.ndarray) else None

    async def _results(self, request: Request) -> list[Piece]:
        """The results of a request without streaming, one piece for each sequence."""
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
    return await _make_sequences(inputs, await prompt(inputs), params, terms)


async def _make_sequences(
    inputs: InputProcessor, prompt: PreparedPrompt, params: SamplingParams | None, terms: RequestOptions
) -> list[Sequence]:
    """Create sequences. Grammars are compiled in another thread, so that the event loop continues."""
    holds = (isinstance(prompt, ChatPrompt) and prompt.tools) or (params is not None and params.structure is not None)
    if not holds:
        return inputs.sequences(prompt, params, terms)
    return await asyncio.get_running_loop().run_in_executor(_COMPILING, inputs.sequences, prompt, params, terms)


async def _scored(prompt: Prompt, top: int | None, terms: RequestOptions, inputs: InputProcessor) -> list[Sequence]:
    return [inputs.scored(await _prepared(_size(prompt), partial(inputs.scored_ids, prompt)), top, terms)]


def _all_prepared(inputs: InputProcessor, prompts: list[AnyPrompt]) -> list[PreparedPrompt]:
    return [inputs.prepared(prompt) for prompt in prompts]


def _size(prompt: AnyPrompt) -> int:
    """Length in characters or token ids. A prompt with images counts as long."""
    if isinstance(prompt, Mapping):
        return _SHORT + 1
    return len(prompt) if hasattr(prompt, "__len__") else 0


async def _prepared(size: int, prepare: Callable[[], Result]) -> Result:
    """Prepare short input here and long input in another thread, so that the event loop continues."""
    return prepare() if size <= _SHORT else await asyncio.to_thread(prepare)
