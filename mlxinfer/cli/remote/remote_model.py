"""A model of a running server, with the methods of `LLM` that `run` and `chat` use."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Union

from ...errors import ModelNotFoundError, ServerError
from ...tools import OfferedTool, offered
from ...types import Chunk, Completion, SamplingParams
from .connection import ServerAddress
from .request import chunk_of, completion_of, fields_of, message_of, usage_of

_CONTEXT = 8192
"""Context in tokens of a model whose server does not tell."""
_SHOWN = {"repeat_penalty": "repetition_penalty"}
"""Names of Ollama's parameters that differ from the fields of `SamplingParams`."""


@dataclass(frozen=True)
class RemotePrompt:
    """A conversation that a server renders; accepted by `RemoteModel` as a `ChatPrompt` is by `LLM`."""

    model: RemoteModel
    messages: Sequence[Mapping[str, Any]]
    """In the form of `LLM`, with the bytes of images."""
    tools: Sequence[Mapping[str, Any]] = ()
    resumed: bool = False
    """True if the last message is an answer to continue."""

    @cached_property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt, which the server counts."""
        return self.model.token_ids(self)

    def continued(self, turn: Mapping[str, Any]) -> RemotePrompt:
        """Return the prompt that continues an answer, which has this text so far."""
        messages, last = list(self.messages), dict(turn)
        if self.resumed:
            before = messages.pop()
            last |= {name: before.get(name, "") + turn.get(name, "") for name in ("content", "reasoning") if name in {*before, *turn}}
        return RemotePrompt(self.model, [*messages, last], self.tools, resumed=True)

    def body(self) -> dict[str, Any]:
        """Return the fields of the request with the conversation."""
        fields: dict[str, Any] = {"messages": [message_of(message) for message in self.messages]}
        if self.tools:
            fields["tools"] = list(self.tools)
        if self.resumed:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields


AnyRemotePrompt = Union[RemotePrompt, list[int]]
"""A conversation, or the tokens of a text."""


class RemoteTokenizer:
    """Tokenizes on the server."""

    def __init__(self, model: RemoteModel, *, chats: bool) -> None:
        self._model = model
        self.chat_template = "" if chats else None
        """None if the model has no chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        found: list[int] = self._model.ask("/tokenize", {"prompt": text})["tokens"]
        return found


class RemoteModel:
    """A model of a server. Methods raise `ServerError` once the server has ended, and `MLXInferError` for its refusals."""

    def __init__(self, address: ServerAddress, entry: Mapping[str, Any]) -> None:
        """Create the model of an entry of `/v1/models`."""
        self._address = address
        self.name: str = entry["id"]
        self.max_context: int = entry.get("max_model_len", _CONTEXT)
        self.tokenizer = RemoteTokenizer(self, chats="tools" in entry.get("capabilities", ()))
        self.notes: list[str] = []
        self.adapters: dict[str, Any] = {}
        self.ended = False
        self._reading = 0
        """Tokens of the prompt that the server reads; 0 if unknown."""

    def close(self) -> None:
        """Do nothing: the server keeps the model."""

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON answer to a request about this model."""
        return self._address.ask("POST", path, {"model": self.name, **body})

    @cached_property
    def default_params(self) -> SamplingParams:
        """The recommendation of the model's authors, as in `LLM.default_params`."""
        lines = [line.split() for line in self.ask("/api/show", {})["parameters"].splitlines()]
        given: dict[str, Any] = {_SHOWN.get(name, name): float(value) for name, value in lines}
        if "top_k" in given:
            given["top_k"] = int(given["top_k"])
        return SamplingParams(**given).resolved()

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the model's files."""
        listed = self._address.ask("GET", "/api/tags")["models"]
        return int(next((each["size"] for each in listed if each["name"].removesuffix(":latest") == self.name), 0))

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Iterable[OfferedTool] | None = None, images: Sequence[bytes] = ()
    ) -> RemotePrompt:
        """Return the prompt of a conversation. `images` come first in the last message."""
        asked = list(messages)
        if images:
            last = asked.pop()
            parts = [{"type": "image", "image": image} for image in images]
            asked.append({**last, "content": [*parts, {"type": "text", "text": last["content"]}]})
        return RemotePrompt(self, asked, [tool.as_openai() for tool in offered(tools).values()])

    def token_ids(self, prompt: RemotePrompt) -> list[int]:
        """Return the tokens of a prompt."""
        found: list[int] = self.ask("/tokenize", prompt.body())["tokens"]
        return found

    def count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens of a conversation's prompt."""
        return len(self.token_ids(RemotePrompt(self, messages)))

    def reading(self) -> tuple[int, int] | None:
        """Return (0, tokens of the prompt) while the server reads a prompt of known length; otherwise None."""
        return (0, self._reading) if self._reading else None

    def stream(self, prompt: AnyRemotePrompt, params: SamplingParams, *, adapter: str | None = None) -> Generator[Chunk, None, None]:
        """Stream an answer. Closing the generator cancels it on the server."""
        started = perf_counter()
        first, last, ended = 0.0, started, Chunk("", finish_reason="stop")
        self._reading = len(prompt.__dict__.get("token_ids", ())) if isinstance(prompt, RemotePrompt) else len(prompt)
        path, body = self._request(prompt, params)
        try:
            with closing(self._address.events(path, {**body, "stream": True, "stream_options": {"include_usage": True}})) as events:
                for event in events:
                    for choice in event["choices"]:
                        chunk = chunk_of(choice)
                        if chunk.finish_reason:
                            ended = chunk
                        elif chunk.text or chunk.reasoning or chunk.tool_calls or chunk.logprobs:
                            last = perf_counter()
                            first, self._reading = first or last, 0
                            yield chunk
                    if event.get("usage"):
                        usage = usage_of(event["usage"], (first or last) - started, last - first if first else 0.0)
                        ended = replace(ended, usage=usage)
            yield ended
        finally:
            self._reading = 0

    def generate(self, prompts: Sequence[AnyRemotePrompt], params: SamplingParams) -> list[Completion]:
        """Return the `n` answers to each prompt."""
        found = []
        for prompt in prompts:
            path, body = self._request(prompt, params)
            started = perf_counter()
            answer = self._address.ask("POST", path, body)
            usage = usage_of(answer.get("usage"), perf_counter() - started)
            found += [completion_of(choice, usage) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
        return found

    def _request(self, prompt: AnyRemotePrompt, params: SamplingParams) -> tuple[str, dict[str, Any]]:
        chat = isinstance(prompt, RemotePrompt)
        asked = prompt.body() if isinstance(prompt, RemotePrompt) else {"prompt": prompt}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return path, {"model": self.name, **asked, **fields_of(params, chat=chat)}


def models_of(address: ServerAddress) -> dict[str, Mapping[str, Any]]:
    """Return the entries of a server's models by name. Raises `OSError` if no server listens, and `ServerError`."""
    try:
        return {entry["id"]: entry for entry in address.ask("GET", "/v1/models")["data"]}
    except (KeyError, TypeError):
        raise ServerError(f"{address} is not a model server: name another address with --url") from None


def served_model(address: ServerAddress, model: str | None) -> RemoteModel:
    """Return a model of a server by its name there; None takes the first. Raises `OSError` without a server, and `ModelNotFoundError`."""
    entries = models_of(address)
    name = next(iter(entries), "") if model is None else model.removesuffix(":latest")
    entry = entries.get(model or name) or entries.get(name)
    if entry is None:
        raise ModelNotFoundError(f"the server at {address} does not have {model}; available: {', '.join(entries)}")
    return RemoteModel(address, entry)
