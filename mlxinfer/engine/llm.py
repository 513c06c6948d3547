"""`LLM`: loads a model, generates, chats, embeds, and returns logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Many
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx
import numpy as np

from ..config import EngineArgs
from ..errors import DeadlineError
from ..loading.load import LoadedModel
from ..loading.weights import Progress
from ..types import Chunk, Completion, EngineStats, SamplingParams, TokenLogprob
from ..util.progress_bar import answers_bar
from .adapter_set import load_into
from .client.inproc_client import InprocClient
from .core.engine import Engine
from .core.sequence import Sequence
from .model_base import ModelBase, prompt_logprobs
from .open_model import OpenModel
from .request_keywords import ChatKeywords, ChatRequestKeywords, GenerateKeywords, RequestKeywords, RequestOptions, chatting, generating
from .text.chat_prompt import ChatPrompt
from .text.hooks import Tracing
from .text.input_processor import AnyPrompt, Prompt, as_prompts
from .text.message_parts import Messages

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache.kv_events import KVEventSink
    from ..interpret.places import Layers
    from ..interpret.trace import Trace
    from ..output_format.format import OutputFormat
    from .text.reranking import Pair, Ranked

Made = TypeVar("Made")


class LLM(ModelBase):
    """A loaded model.

        llm = LLM("smollm2")
        print(llm.generate("Once upon a time", max_tokens=20)[0])

    Any number of threads may use it at once: it computes in their threads, and their requests run together. `AsyncLLM` has the same methods
    for asyncio.

    Every request takes, besides `params`: `client_id` (clients are served evenly), `priority` (lower is served first) and `timeout_s`,
    after which an answer ends early with `finish_reason` "timeout". Requests that generate also take each field of `SamplingParams` as a
    keyword, such as `max_tokens=20`. A keyword wins over the same field of `params`.
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
        """The loaded model, with its summary and files. Raises `MLXInferError` after `close`."""
        return self._client.opened.loaded

    @property
    def engine(self) -> Engine:
        """The engine, for measurements and experiments. No other thread may use the model meanwhile. Raises `MLXInferError` after
        `close`."""
        return self._client.outputs.engine

    @property
    def ended(self) -> bool:
        """True after `close`."""
        return self._client.ended

    @property
    def output_format(self) -> OutputFormat:
        """The model's format of reasoning and calls in chats."""
        return self._client.opened.inputs.output_format

    def send_kv_events(self, sink: KVEventSink) -> None:
        """See `AsyncLLM.send_kv_events`. Raises `MLXInferError` after `close`."""
        with self._client.turn() as outputs:
            outputs.engine.send_kv_events(sink)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter for further requests: a folder of PEFT or mlx-lm, or a GGUF file. Raises `SettingError` for an invalid name,
        `AdapterError` for a used name or a file that does not fit the model, and `MemoryPlanError` if the memory plan has no room
        (`adapter_memory_gb`). After an error nothing has changed."""
        load_into(self._client.opened.adapters, name, path, self._client.change_adapters)

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter. Its memory is freed after the requests that use it. Raises `AdapterError` for an unknown
        name."""
        self._client.change_adapters(partial(self._client.opened.adapters.unload, name))

    def stats(self) -> EngineStats:
        """Totals of all requests so far, and the present state. Raises `MLXInferError` after `close`."""
        with self._client.turn() as outputs:
            return outputs.engine.stats()

    def generate(
        self,
        prompts: AnyPrompt | Many[AnyPrompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[GenerateKeywords],
    ) -> list[Completion]:
        """Answers to one or any number of prompts, as one batch. A prompt is text, token ids, a `chat_prompt`, or
        `{"prompt": text, "images": [...]}` with the model's placeholder in the text for each image.

        Returns a list, also for one prompt: `n` completions for each prompt, in order. `params` is one object for all prompts, or a list
        with one for each. `progress` shows a bar in a terminal or notebook. Raises `PromptError` and `SamplingError` before anything is
        computed.
        """
        params, terms = generating("generate", params, options)
        inputs, items = self._client.opened.inputs, as_prompts(prompts)
        pairs = zip(items, inputs.all_params(params, len(items)), strict=True)
        requests = deque(inputs.sequences(inputs.prepared(prompt), each, terms) for prompt, each in pairs)
        with answers_bar(sum(map(len, requests))) if progress else nullcontext() as show:
            return self._client.complete(requests, show)

    def stream(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generator[Chunk, None, None]:
        """The answer in pieces. Closing the iterator cancels the request.

        With `n` answers, `Chunk.index` is the answer's index; the last piece of each has a `finish_reason`. Raises `PromptError` and
        `SamplingError` at once, and `EngineError` during an answer if the engine fails.
        """
        return self._client.stream(self._sequences(prompt, *generating("stream", params, options)))

    def bursts(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generator[list[Chunk], None, None]:
        """`stream`, with all available pieces in one list, for programs that forward them."""
        return self._client.bursts(self._sequences(prompt, *generating("bursts", params, options)))

    def _sequences(self, prompt: AnyPrompt, params: SamplingParams | None, terms: RequestOptions) -> list[Sequence]:
        inputs = self._client.opened.inputs
        return inputs.sequences(inputs.prepared(prompt), params, terms)

    def chat_prompt(self, messages: Messages, **chat: Unpack[ChatKeywords]) -> ChatPrompt:
        """The prompt that `chat` would use, for `generate` and `stream`: takes the messages, `tools`, `tool_choice`, `parallel_tool_calls`
        and `template_vars` of `chat`."""
        return self._client.opened.inputs.chat(messages, **chat)

    def count_tokens(self, messages: Messages, **chat: Unpack[ChatKeywords]) -> int:
        """Tokens of the prompt that `chat` would use. Images count by the sizes in their headers; none is decoded."""
        return len(self._client.opened.inputs.rendered(messages, **chat).prompt.token_ids)

    def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatRequestKeywords]) -> Completion:
        """The assistant's next turn, one `Completion` (the first, if `n` is above 1).

        `messages` are the user's message as text, or dicts with `role` and `content`. Keywords besides those of `generate`:

            tools: Typed Python functions, dicts as OpenAI's API takes them, or `Tool`s. Calls of the model are in
                `Completion.tool_calls`; nothing is run.
            tool_choice: "auto" (default), "none", "required" or a tool's name.
            parallel_tool_calls: False for one call at most; True by default.
            template_vars: Variables of the model's chat template, such as `{"enable_thinking": False}`.
            images: Images that come first in the last user message. Messages may have them as parts instead.

        An image is a path, bytes, a PIL image or a uint8 array [height, width, 3]: docs/vision.md. Raises `TemplateError` and `ImageError`
        too.
        """
        chat, params, terms = chatting("chat", params, options)
        inputs = self._client.opened.inputs
        return self._client.complete(deque([inputs.sequences(inputs.chat(messages, **chat), params, terms)]))[0]

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Unpack[ChatRequestKeywords]
    ) -> Generator[Chunk, None, None]:
        """`chat` in pieces, like those of `stream`. Takes the keywords of `chat`."""
        chat, params, terms = chatting("stream_chat", params, options)
        inputs = self._client.opened.inputs
        return self._client.stream(inputs.sequences(inputs.chat(messages, **chat), params, terms))

    def score(self, prompt: Prompt, top: int = 0, **options: Unpack[RequestKeywords]) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's tokens from the second on, each with the `top` likeliest (0 to 64). Raises `PromptError`,
        `SamplingError`, and `DeadlineError` after `timeout_s`."""
        terms, inputs = RequestOptions.of("score", options), self._client.opened.inputs
        sequence = inputs.scored(inputs.scored_ids(prompt), top, terms)
        return prompt_logprobs(list(self._client.stream([sequence])), terms.timeout_s)

    def logits(self, token_ids: Prompt, **options: Unpack[RequestKeywords]) -> mx.array:
        """Logits of the next token after each token, float32 `[T, vocab]`, evaluated, by the same cache and steps as in `generate`."""
        terms, inputs = RequestOptions.of("logits", options), self._client.opened.inputs
        return self._client.logits(inputs.scored(inputs.scored_ids(token_ids), None, terms))

    def embed(
        self,
        texts: Prompt | Many[Prompt],
        dimensions: int | None = None,
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> np.ndarray:
        """Vectors of texts (or of unchanged token ids), numpy float32 `[n, d]`, by the checkpoint's own recipe.

        `dimensions` keeps the first numbers of each vector, for models trained for it (Matryoshka). `prompt_name` puts one of the
        checkpoint's prompts before each text, `input_type` ("query" or "document") the prompt of that kind, if there is one. `truncate`
        cuts texts that are too long. Raises `UnsupportedModelError` for a model without such a recipe, `PromptError`, `SamplingError`, and
        `DeadlineError` after `timeout_s`.
        """
        from .text.embedding import Embedder, check_texts

        check_texts(texts)
        terms, embedder = RequestOptions.of("embed", options), Embedder.of(self._client.opened)
        embedder.check_dimensions(dimensions)
        ids = embedder.token_ids(texts, embedder.prompt(prompt_name, input_type), truncate=truncate)
        return embedder.finish(self._pool([embedder.sequences(ids, terms)], terms), dimensions)

    def rerank(
        self,
        query: str,
        documents: Many[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Ranked]:
        """The `top_n` most relevant documents (all by default), best first. `instruction` defines relevance for a reranker; an embedding
        model ranks by cosine. Raises as `embed` does."""
        from .text.reranking import ranked

        pairs = [(query, document) for document in documents]
        return ranked(self.relevance(pairs, instruction=instruction, **options), documents, top_n)

    def relevance(self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]) -> np.ndarray:
        """Relevance of the second text of each pair to the first, `[n]`: see `rerank`."""
        from .text.reranking import check_pairs, score_pairs, scorer

        check_pairs(pairs)
        terms, how = RequestOptions.of("relevance", options), scorer(self._client.opened)
        waves = how.waves(how.token_ids(pairs, instruction), terms)
        return score_pairs(how, pairs, self._pool(waves, terms))

    def _pool(self, waves: list[list[Sequence]], terms: RequestOptions) -> list[np.ndarray]:
        found = [vector for wave in waves for vector in self._client.pooled(wave)]
        vectors = [vector for vector in found if vector is not None]
        if len(vectors) < len(found):
            raise DeadlineError(f"the texts were not read within {terms.timeout_s:g} s")
        return vectors

    def trace(
        self,
        prompt: AnyPrompt,
        layers: Layers = None,
        what: str | Iterable[str] = ("residual", "attention", "mlp", "logits"),
        **options: Unpack[RequestKeywords],
    ) -> Trace:
        """Activations of a prompt, as `generate` takes them, by layer; `interpret.Trace` lists the values of `what`.

        `layers` is one, several, or None for all. Active interventions apply. Raises `SettingError`, also for a trace of more than 4 GiB,
        and `UnsupportedModelError` for a model that runs on mlx-lm's graph.
        """
        terms, opened = RequestOptions.of("trace", options), self._client.opened
        ids, images = opened.inputs.traced(prompt)
        tracing = Tracing.of(opened.loaded.model, what, layers, ids)
        logits = self._client.logits(opened.inputs.scored(ids, None, terms, tracing.hooks, images))
        return tracing.result(opened.loaded, ids, logits, self._make, images)

    def load_trace(self, path: str | Path) -> Trace:
        """Read a trace of this model that `Trace.save` wrote. Raises `CheckpointError` for another file, and `SettingError` for another
        model's trace."""
        from .text.hooks import load_trace

        return load_trace(Path(path), self._client.opened.loaded, self._make)

    def _make(self, compute: Callable[[], Made]) -> Made:
        with self._client.turn():
            return compute()

    def close(self) -> None:
        """Free the memory. Streams end; further calls raise `MLXInferError`."""
        self._closed = self._described.without_weights()
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
