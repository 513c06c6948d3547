"""The library's front door: load a model, generate, chat, look at logits."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Many
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, Union

import mlx.core as mx

from ..cache.backend import fallback_lines
from ..cache.format import KVFormat
from ..cache.quality import loss_line
from ..cache.report import unquantized_lines
from ..config import EngineConfig
from ..errors import MLXInferError, PromptError
from ..loading.load import LoadedModel, load
from ..sampling import sample_seed
from ..types import Chunk, Completion, SamplingParams
from .answer import Answer
from .defaults import default_params
from .engine import Engine, Logits, Token
from .plan import plan_engine
from .sequence import Sequence

Prompt = Union[str, Many[int]]
Messages = Many[Mapping[str, Any]]


class LLM:
    """A model that is ready to answer.

        llm = LLM("smollm2")
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20))[0].text

    `path_or_id` is a directory (Hugging Face or MLX), a GGUF file, an alias or a hub id. `dtype` is the compute dtype ("float32",
    "bfloat16", "float16"; by default the best one for the device). `kv` is the bits that keys and values are cached in ("16", "8", "4",
    "k8v4"...: docs/kv-cache.md), `kv_first16` keeps each sequence's first page of them unquantized. `bits` quantizes at load what is
    not quantized yet. Raises `MLXInferError`s. One thread at a time may use it.
    """

    def __init__(
        self,
        path_or_id: str | Path,
        dtype: str | mx.Dtype | None = None,
        kv: str = "16",
        *,
        kv_first16: bool = False,
        bits: int | None = None,
        group_size: int = 64,
        max_context: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        form = KVFormat.parse(kv, first16=kv_first16)
        loaded = load(path_or_id, dtype=dtype, bits=bits, group_size=group_size, kv=form, progress=progress)
        self._attach(loaded, plan_engine(loaded, max_context=max_context, kv=form), form)

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig | None = None, kv: KVFormat | None = None) -> LLM:
        """A front door to a model that is loaded already."""
        self = cls.__new__(cls)
        form = kv or KVFormat()
        self._attach(loaded, config or plan_engine(loaded, kv=form), form)
        return self

    def _attach(self, loaded: LoadedModel, config: EngineConfig, kv: KVFormat) -> None:
        self.tokenizer = loaded.tokenizer
        self.config: dict[str, Any] = loaded.config
        self.name: str = loaded.name
        self.kv = kv
        self.notes: tuple[str, ...] = (*loaded.notes, *_cache_notes(loaded, kv))
        self.weight_bytes: int = loaded.weight_bytes
        self.dtype = loaded.dtype
        self.max_context = config.max_context
        self.default_params = default_params(loaded.generation_config)
        self._engine: Engine | None = Engine(loaded.model, config, dtype=loaded.dtype, kv=kv)
        self._answers: dict[Sequence, Answer] = {}
        self._chunks: dict[Sequence, list[Chunk]] = {}

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise MLXInferError("this LLM is closed: create a new one")
        return self._engine

    def generate(self, prompts: Prompt | Many[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Answers to one prompt or many, as one batch: `n` completions for each prompt, in order. A prompt is text or token ids."""
        params = params or self.default_params
        answers: list[Answer] = []
        try:
            for ids in [self._token_ids(p) for p in _as_prompts(prompts)]:
                answers += self._submit(ids, params)
            for answer in answers:
                for _ in self._drain(answer):
                    pass
        finally:
            self._cancel(answers)
        return [answer.completion() for answer in answers]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """The answer in pieces. Closing the iterator cancels the request. `n` must be 1."""
        params = params or self.default_params
        if params.n != 1:
            raise PromptError("a stream has one answer: use n=1, or generate() for more")
        ids = self._token_ids(prompt)
        return self._stream(ids, params)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        **template_vars: Any,
    ) -> Completion:
        """The assistant's next turn. `messages` are dicts with `role` and `content`, rendered by the model's own chat template."""
        return self.generate([self.tokenizer.encode_chat(messages, tools=tools, **template_vars)], params)[0]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        **template_vars: Any,
    ) -> Generator[Chunk, None, None]:
        """`chat` in pieces."""
        return self.stream(self.tokenizer.encode_chat(messages, tools=tools, **template_vars), params)

    def logits(self, token_ids: Many[int]) -> mx.array:
        """float32 `[T, vocab]`: after each token, the logits of the next, computed by the cache and step that generate."""
        ids = self._check_ids(token_ids)
        sequence = Sequence(ids, SamplingParams(), seed=0, limit=len(ids), wants_logits=True)
        self.engine.add(sequence)
        rows: list[mx.array] = []
        try:
            while sequence.finish_reason is None:
                rows += self._step(sequence)
        finally:
            if self._engine is not None:
                self._engine.abort(sequence)
        return mx.concatenate(rows)

    def close(self) -> None:
        """Give the memory back. Streams end; further calls raise."""
        if self._engine is not None:
            self._cancel(list(self._answers.values()))
            self._engine = None
            mx.clear_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _submit(self, ids: list[int], params: SamplingParams) -> list[Answer]:
        """The `n` sequences of a request, put on the engine's waiting list."""
        engine = self.engine
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        limit = min(len(ids) + (params.max_tokens or self.max_context), self.max_context)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids)
        sequences = [Sequence(ids, params, sample_seed(seed, i), limit, stop_ids, i) for i in range(params.n)]
        sequences[0].followers = sequences[1:]
        engine.add(sequences[0])
        answers = [Answer(s, self.tokenizer) for s in sequences]
        for answer in answers:
            self._answers[answer.sequence] = answer
            self._chunks[answer.sequence] = []
        return answers

    def _stream(self, ids: list[int], params: SamplingParams) -> Generator[Chunk, None, None]:
        answers = self._submit(ids, params)
        try:
            yield from self._drain(answers[0])
        finally:
            self._cancel(answers)

    def _drain(self, answer: Answer) -> Generator[Chunk, None, None]:
        """An answer's chunks to its end; every step that this takes serves the other answers as well."""
        chunks = self._chunks[answer.sequence]
        while True:
            while chunks:
                chunk = chunks.pop(0)
                yield chunk
                if chunk.finish_reason:
                    return
            if answer.finish_reason:
                return
            self._step(answer.sequence)

    def _step(self, sequence: Sequence) -> list[mx.array]:
        """One engine step. Tokens go to their answers; the rows of logits that belong to `sequence` are returned."""
        rows = []
        for event in self.engine.step():
            if isinstance(event, Logits):
                if event.sequence is sequence:
                    rows.append(event.rows)
            elif isinstance(event, Token):
                self._receive(event)
        return rows

    def _receive(self, token: Token) -> None:
        answer = self._answers.get(token.sequence)
        if answer is None:
            return
        chunk = answer.add(token)
        self._chunks[token.sequence].append(chunk)
        if chunk.finish_reason and token.sequence.finish_reason is None:
            self.engine.abort(token.sequence, "stop")

    def _cancel(self, answers: Many[Answer]) -> None:
        for answer in answers:
            self._answers.pop(answer.sequence, None)
            self._chunks.pop(answer.sequence, None)
            if self._engine is not None:
                self._engine.abort(answer.sequence)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        checked = self._check_ids(ids)
        if len(checked) >= self.max_context:
            raise PromptError(
                f"the prompt has {len(checked)} tokens, which leaves no room for an answer in the context of {self.max_context}: shorten it"
            )
        return checked

    def _check_ids(self, ids: Many[int]) -> list[int]:
        ids = list(ids)
        if not ids:
            raise PromptError("the prompt is empty")
        if len(ids) > self.max_context:
            raise PromptError(f"{len(ids)} tokens do not fit in the context of {self.max_context}")
        size = self.engine.model.vocab_size
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, SupportsIndex) or not 0 <= token < size:
                raise PromptError(f"token id {token!r} is not one of the model's (0 to {size - 1})")
            ids[i] = index(token)
        return ids


def _cache_notes(loaded: LoadedModel, kv: KVFormat) -> list[str]:
    loss = loss_line(kv)
    layers, dtype = loaded.model.layers, loaded.dtype
    return [*unquantized_lines(layers, kv, dtype), *fallback_lines(layers, kv, dtype), *([loss] if loss else [])]


def _as_prompts(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
