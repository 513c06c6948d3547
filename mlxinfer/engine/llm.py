"""The library's front door: load a model, generate, chat, look at logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

from ..cache.kv_format import KVFormat
from ..config import EngineConfig
from ..errors import MLXInferError, QueueFullError
from ..loading.load import LoadedModel
from ..loading.memory_plan import engine_config, plan_memory
from ..types import Chunk, Completion, EngineStats, SamplingParams
from .engine import Engine
from .input_processor import Messages, Prompt, RequestOptions, as_prompts, one_answer
from .output_processor import FEED, Output, OutputProcessor
from .sequence import Sequence
from .settings import OpenModel, Settings


class LLM:
    """A model that is ready to answer.

        llm = LLM("smollm2")
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))[0].text

    `settings` are the fields of `engine.settings.Settings`, such as `bits`, `max_context`, `memory_gb`, `draft`. `progress` is told bytes
    read and bytes in all. Raises `MLXInferError`s. One thread at a time may use it; `AsyncLLM` is for asyncio.

    Requests take, beside `params`: `client_id` (clients get their turns evenly), `priority` (lower is served first) and `timeout_s`, after
    which an answer ends with what it has, and `finish_reason` "timeout".
    """

    def __init__(
        self,
        path_or_id: str | Path,
        dtype: str | mx.Dtype | None = None,
        kv: str = "16",
        *,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        self._attach(OpenModel.open(Settings(path_or_id, dtype, kv, **settings), progress))

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig | None = None, kv: KVFormat | None = None) -> LLM:
        """A front door to a model that is loaded already."""
        self = cls.__new__(cls)
        form = kv or KVFormat()
        self._attach(OpenModel.of(loaded, config or engine_config(plan_memory(loaded, kv=form)), form))
        return self

    def _attach(self, opened: OpenModel) -> None:
        loaded = opened.loaded
        self.tokenizer = loaded.tokenizer
        self.config: dict[str, Any] = loaded.config
        self.name: str = loaded.name
        self.kv = opened.kv
        self.plan = opened.plan
        self.notes = opened.notes
        self.weight_bytes: int = loaded.weight_bytes
        self.dtype = loaded.dtype
        self.max_context = opened.config.max_context
        self._intake = opened.intake
        self.default_params = self._intake.default_params
        self._desk: OutputProcessor | None = OutputProcessor(opened.engine(), loaded.tokenizer)
        self._chunks: dict[Sequence, deque[Chunk]] = {}

    @property
    def engine(self) -> Engine:
        return self._open_desk.engine

    @property
    def _open_desk(self) -> OutputProcessor:
        if self._desk is None:
            raise MLXInferError("this LLM is closed: create a new one")
        return self._desk

    def stats(self) -> EngineStats:
        """What all requests took so far, and what there is now."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | None = None,
        *,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Answers to one prompt or any number of them, as one batch: `n` completions for each prompt, in order. A prompt is text or
        token ids. Raises `PromptError`, before anything is computed."""
        terms = RequestOptions.of(client_id, priority, timeout_s)
        requests = deque(self._intake.sequences(self._intake.token_ids(p), params, terms) for p in as_prompts(prompts))
        answers: list[Output] = []
        try:
            while requests:
                self._feed(requests, answers)
                self._step()
            while any(answer.finish_reason is None for answer in answers):
                self._step()
        finally:
            self._cancel(answers)
        return [answer.completion() for answer in answers]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        client_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Generator[Chunk, None, None]:
        """The answer in pieces. Closing the iterator cancels the request. `n` must be 1."""
        one_answer(params or self.default_params)
        terms = RequestOptions.of(client_id, priority, timeout_s)
        return self._stream(self._intake.sequences(self._intake.token_ids(prompt), params, terms))

    def chat(
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
        ids = self._intake.chat_ids(messages, tools, template_vars)
        return self.generate([ids], params, client_id=client_id, priority=priority, timeout_s=timeout_s)[0]

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
    ) -> Generator[Chunk, None, None]:
        """`chat` in pieces."""
        ids = self._intake.chat_ids(messages, tools, template_vars)
        return self.stream(ids, params, client_id=client_id, priority=priority, timeout_s=timeout_s)

    def logits(self, token_ids: Many[int]) -> mx.array:
        """float32 `[T, vocab]`: after each token, the logits of the next, computed by the cache and step that generate."""
        desk, ids = self._open_desk, self._intake.check(token_ids)
        sequence = Sequence(ids, SamplingParams(), seed=0, max_length=len(ids), wants_logits=True)
        rows = desk.rows[sequence] = []
        try:
            desk.engine.add(sequence)
            while sequence.finish_reason is None:
                self._step()
        finally:
            desk.rows.pop(sequence, None)
            desk.engine.abort(sequence)
        return mx.concatenate(rows)

    def close(self) -> None:
        """Give the memory back. Streams end; further calls raise."""
        if self._desk is not None:
            self._desk.cancel(list(self._desk.answers.values()))
            self._desk.engine.close()
            self._desk = None
            mx.clear_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _feed(self, requests: deque[list[Sequence]], answers: list[Output]) -> None:
        """Submit requests while there is room for them on the waiting list, as many as keep the engine busy."""
        desk = self._open_desk
        while requests and len(desk.answers) < FEED * desk.engine.config.max_sequences:
            try:
                answers += desk.submit(requests[0])
            except QueueFullError:
                if desk.engine.idle:
                    raise
                return
            requests.popleft()

    def _stream(self, sequences: list[Sequence]) -> Generator[Chunk, None, None]:
        answers = self._open_desk.submit(sequences)
        chunks = self._chunks[sequences[0]] = deque()
        try:
            yield from self._drain(answers[0], chunks)
        finally:
            self._chunks.pop(sequences[0], None)
            self._cancel(answers)

    def _drain(self, answer: Output, chunks: deque[Chunk]) -> Generator[Chunk, None, None]:
        """An answer's chunks to its end; every step that this takes serves the other answers as well."""
        while True:
            while chunks:
                chunk = chunks.popleft()
                yield chunk
                if chunk.finish_reason:
                    return
            if answer.finish_reason:
                return
            self._step()

    def _step(self) -> None:
        for answer, chunk in self._open_desk.step():
            if answer.sequence in self._chunks:
                self._chunks[answer.sequence].append(chunk)

    def _cancel(self, answers: Many[Output]) -> None:
        if self._desk is not None:
            self._desk.cancel(answers)
