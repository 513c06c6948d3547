"""The library's front door: load a model, generate, chat, look at logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np

from ..config import EngineArgs
from ..loading.load import LoadedModel
from ..loading.weights import Progress
from ..tools import OfferedTool, ToolChoice
from ..types import Chunk, Completion, EngineStats, SamplingParams, TokenLogprob
from .adapter_set import load_into
from .client.inproc_client import InprocClient
from .core.engine import Engine
from .core.sequence import Sequence
from .model_base import FrontDoor, prompt_logprobs
from .open_model import OpenModel
from .request_keywords import GenerateKeywords, RequestKeywords, RequestOptions, generating
from .text.chat_prompt import ChatPrompt
from .text.hooked_requests import Tracing
from .text.input_processor import AnyPrompt, Messages, Prompt, as_prompts
from .text.pooled_requests import PooledRequests, out_of_time

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache.kv_events import KVEventSink
    from ..interpret.places import Layers
    from ..interpret.trace import Trace
    from ..output_format.format import OutputFormat

Made = TypeVar("Made")


class LLM(FrontDoor, PooledRequests):
    """A model that is ready to answer.

        llm = LLM("smollm2")
        print(llm.generate("Once upon a time", max_tokens=20)[0])

    Any thread may use it, several at once too: it computes in their threads, and their requests run together. `AsyncLLM` has the same
    methods for asyncio.

    Every request takes, besides `params`: `client_id` (clients get their turns evenly), `priority` (lower is served first) and
    `timeout_s`, after which an answer ends with what it has, and `finish_reason` "timeout". Requests that are answered take each field of
    `SamplingParams` as a keyword too, such as `max_tokens=20`, which wins over the same field of `params`.
    """

    def _start(self, args: EngineArgs, progress: Progress | None) -> None:
        self._client = InprocClient(partial(OpenModel.open, args, progress))
        self._closed: OpenModel | None = None
        """Describes the model after `close`."""

    @property
    def _described(self) -> OpenModel:
        return self._closed or self._client.opened

    @property
    def loaded(self) -> LoadedModel:
        """The model itself, with its summary and files. Raises `MLXInferError` if it is closed."""
        return self._client.opened.loaded

    @property
    def engine(self) -> Engine:
        """The engine, for measurements and experiments; no other thread may use the model meanwhile. Raises `MLXInferError` if it is
        closed."""
        return self._client.outputs.engine

    @property
    def ended(self) -> bool:
        """Whether it was closed."""
        return self._client.ended

    @property
    def output_format(self) -> OutputFormat:
        """How the model writes reasoning and calls in chats."""
        return self._client.opened.inputs.output_format

    def send_kv_events(self, sink: KVEventSink) -> None:
        """As `AsyncLLM.send_kv_events`. Raises `MLXInferError` if it is closed."""
        with self._client.turn() as outputs:
            outputs.engine.send_kv_events(sink)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Let requests ask for a further LoRA adapter: a folder of PEFT or mlx-lm, or a GGUF file. Raises `SettingError` for a name that
        cannot be, `AdapterError` for one that is taken and for a file that does not fit the model, and `MemoryPlanError` where the memory
        plan has no room (`adapter_memory_gb`); then nothing has changed."""
        load_into(self._client.opened.adapters, name, path, self._client.change_adapters)

    def unload_adapter(self, name: str) -> None:
        """Let no further request ask for an adapter. Requests that have it are answered with it, and then its memory is given back. Raises
        `AdapterError` for a name that there is not."""
        self._client.change_adapters(partial(self._client.opened.adapters.unload, name))

    def stats(self) -> EngineStats:
        """What all requests took so far, and what there is now. Raises `MLXInferError` if it is closed."""
        with self._client.turn() as outputs:
            return outputs.engine.stats()

    def generate(
        self,
        prompts: AnyPrompt | Many[AnyPrompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]:
        """Answers to one prompt or any number of them, as one batch. A prompt is text, token ids or a `chat_prompt`.

        Returns a list, for one prompt too: `n` completions for each prompt, in order. `params` are one for all prompts, or a list with one
        for each. Raises `PromptError` and `SamplingError` before anything is computed.
        """
        params, terms = generating("generate", params, options)
        inputs, items = self._client.opened.inputs, as_prompts(prompts)
        pairs = zip(items, inputs.all_params(params, len(items)), strict=True)
        return self._client.complete(deque(inputs.sequences(inputs.prepared(prompt), each, terms) for prompt, each in pairs))

    def stream(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generator[Chunk, None, None]:
        """The answer in pieces. Closing the iterator cancels the request.

        With `n` answers, `Chunk.index` tells whose piece it is; the last piece of each has a `finish_reason`. Raises `PromptError` and
        `SamplingError` at once, and `EngineError` in the middle of an answer if the engine fails.
        """
        return self._client.stream(self._sequences(prompt, *generating("stream", params, options)))

    def bursts(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generator[list[Chunk], None, None]:
        """`stream`, with those pieces in one list that are there at the same time: for programs that pass them on."""
        return self._client.bursts(self._sequences(prompt, *generating("bursts", params, options)))

    def _sequences(self, prompt: AnyPrompt, params: SamplingParams | None, terms: RequestOptions) -> list[Sequence]:
        inputs = self._client.opened.inputs
        return inputs.sequences(inputs.prepared(prompt), params, terms)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Iterable[OfferedTool] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_vars: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """What `chat` asks the model, for `generate` and `stream`: see `chat` for what it takes."""
        return self._client.opened.inputs.chat(messages, tools, tool_choice, parallel_tool_calls, template_vars)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Iterable[OfferedTool] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_vars: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Completion:
        """The assistant's next turn, one `Completion` (the first, if `n` is above 1).

        `messages` are the user's message as text, or dicts with `role` and `content`. The model's own chat template renders them, and gets
        `template_vars`, such as `{"enable_thinking": False}`. `tools` are typed Python functions, dicts as OpenAI's API takes them, or
        `Tool`s; the calls that the model asks for are in `Completion.tool_calls`, and nothing is run. `tool_choice` is "auto", "none",
        "required" or a tool's name; without `parallel_tool_calls` there is one call at most. Raises `TemplateError` too.
        """
        params, terms = generating("chat", params, options)
        inputs = self._client.opened.inputs
        prompt = inputs.chat(messages, tools, tool_choice, parallel_tool_calls, template_vars)
        return self._client.complete(deque([inputs.sequences(prompt, params, terms)]))[0]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Iterable[OfferedTool] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_vars: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Generator[Chunk, None, None]:
        """`chat` in pieces, as those of `stream`."""
        params, terms = generating("stream_chat", params, options)
        inputs = self._client.opened.inputs
        prompt = inputs.chat(messages, tools, tool_choice, parallel_tool_calls, template_vars)
        return self._client.stream(inputs.sequences(prompt, params, terms))

    def score(self, prompt: Prompt, top: int = 0, **options: Unpack[RequestKeywords]) -> list[TokenLogprob]:
        """How likely each token of a prompt is, from the second on, and what the `top` likeliest (0 to 64) would have been. Raises
        `PromptError`, `SamplingError`, and `DeadlineError` after `timeout_s`."""
        terms, inputs = RequestOptions.of("score", options), self._client.opened.inputs
        sequence = inputs.scored(inputs.scored_ids(prompt), top, terms)
        return prompt_logprobs(list(self._client.stream([sequence])), terms.timeout_s)

    def logits(self, token_ids: Prompt, **options: Unpack[RequestKeywords]) -> mx.array:
        """float32 `[T, vocab]`, evaluated: after each token, the logits of the next, computed by the cache and step that generate."""
        terms, inputs = RequestOptions.of("logits", options), self._client.opened.inputs
        return self._client.logits(inputs.scored(inputs.scored_ids(token_ids), None, terms))

    def _open_model(self) -> OpenModel:
        return self._client.opened

    def _pool(self, waves: list[list[Sequence]], terms: RequestOptions) -> list[np.ndarray]:
        found = [vector for wave in waves for vector in self._client.pooled(wave)]
        vectors = [vector for vector in found if vector is not None]
        if len(vectors) < len(found):
            raise out_of_time(terms)
        return vectors

    def trace(
        self,
        prompt: Prompt,
        layers: Layers = None,
        what: str | Iterable[str] = ("residual", "attention", "mlp", "logits"),
        **options: Unpack[RequestKeywords],
    ) -> Trace:
        """What the model computes for a prompt (text or token ids), layer by layer: see `interpret.Trace` for `what` there is.

        `layers` is one, several, or None for all. Interventions that are active hold for it. Raises `SettingError`, also for a trace of
        more than 4 GiB, and `UnsupportedModelError` for a model that runs on mlx-lm's graph.
        """
        terms, opened = RequestOptions.of("trace", options), self._client.opened
        ids = opened.inputs.scored_ids(prompt)
        tracing = Tracing.of(opened.loaded.model, what, layers, ids)
        logits = self._client.logits(opened.inputs.scored(ids, None, terms, tracing.hooks))
        return tracing.result(opened.loaded, ids, logits, self._make)

    def _make(self, compute: Callable[[], Made]) -> Made:
        with self._client.turn():
            return compute()

    def close(self) -> None:
        """Give the memory back. Streams end; further calls raise `MLXInferError`."""
        self._closed = self._described.without_weights()
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
