"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..errors import invalid
from ..models import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, encode_chat, stream
from ..validation import MaxTokens, StrictModel, Unsupported
from .extras import VERBOSITY
from .protocol import (
    FINGERPRINT,
    MAX_TOP_LOGPROBS,
    ChoiceLogprobs,
    Messages,
    Sampling,
    UsageDict,
    error_event,
    for_template,
    token_logprobs,
    usage_of,
)


class TemplateVariables(StrictModel):
    """Variables of the chat template that a request may set."""

    enable_thinking: bool | None = None
    """Whether a reasoning model thinks before it answers."""


class ChatRequest(Sampling):
    """The body of `POST /v1/chat/completions`. Of the fields from `tools` on, only the neutral values are supported so far."""

    messages: Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[Any, Unsupported([])] = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Unsupported(True, False)] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported("none")] = None
    verbosity: Annotated[Any, VERBOSITY] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None

    def limit(self) -> int | None:
        """Tokens that an answer may have; None is up to the end of the context. Raises `APIError`."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens mean the same: give one", "max_tokens", "invalid_value")
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token whose log-probabilities are returned; None is no log-probabilities. Raises `APIError`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only for logprobs=true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: UsageDict


async def create(context: RequestContext, body: ChatRequest) -> ASGIApp:
    served = context.server.models.get(body.model)
    params = body.params(served, body.limit(), body.wanted_logprobs())
    wants_usage = body.wants_usage()
    variables = body.chat_template_kwargs.model_dump(exclude_none=True) if body.chat_template_kwargs else {}
    prompt = await encode_chat(served, for_template(body.messages), **variables)
    request = GenerateRequest(served, prompt, params, client_id=body.user or "", structure_field=body.structure[0])
    if body.stream:
        events = _Events(served, wants_usage)
        return sse.Stream(stream(context, request, events.render), end=events.end, failed=error_event, limits=context.limits)
    answers = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(_completion(served, answers))


def routes(server: Server) -> list[Endpoint]:
    """The endpoint of this module."""
    doc = Doc("The next message of a conversation", ChatCompletion, streams=sse.EVENT_STREAM)
    return [Endpoint("POST", "/v1/chat/completions", create, ChatRequest, doc, server=server)]


def _new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _completion(served: ServedModel, answers: list[Completion]) -> ChatCompletion:
    return ChatCompletion(
        id=_new_id(),
        object="chat.completion",
        created=int(time.time()),
        model=served.name,
        system_fingerprint=FINGERPRINT,
        choices=[_choice(served, answer) for answer in answers],
        usage=usage_of([[answer.usage for answer in answers]]),
    )


def _choice(served: ServedModel, answer: Completion) -> Choice:
    return Choice(
        index=answer.index,
        message=AnswerMessage(role="assistant", content=answer.text, refusal=None),
        logprobs=None if answer.logprobs is None else token_logprobs(served.llm.tokenizer, answer.logprobs),
        finish_reason=answer.finish_reason,
    )


class _Events:
    """The events of a stream. Each of the `n` answers begins with an event that has its role and ends with one that has its reason."""

    def __init__(self, served: ServedModel, wants_usage: bool) -> None:
        self._tokenizer = served.llm.tokenizer
        self._wants_usage = wants_usage
        head = {"id": _new_id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": served.name}
        self._head = {**head, "system_fingerprint": FINGERPRINT}
        self._template = sse.Template(self._head, "choices", {"usage": None} if wants_usage else {})
        self._begun: set[int] = set()
        self._usages: list[Usage] = []

    def render(self, chunks: list[Chunk]) -> bytes:
        """The events of these chunks."""
        return b"".join([self._chunk(chunk) for chunk in chunks])

    def end(self) -> bytes:
        """The events after all answers."""
        usage = sse.data({**self._head, "choices": [], "usage": usage_of([self._usages])}) if self._wants_usage else b""
        return usage + sse.DONE

    def _chunk(self, chunk: Chunk) -> bytes:
        out = b""
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            out = self._choice(chunk.index, {"role": "assistant", "content": "", "refusal": None})
        if chunk.text or chunk.logprobs:
            logprobs = token_logprobs(self._tokenizer, chunk.logprobs) if chunk.logprobs else None
            out += self._choice(chunk.index, {"content": chunk.text}, logprobs)
        if chunk.finish_reason:
            out += self._choice(chunk.index, {}, None, chunk.finish_reason)
            self._usages += [chunk.usage] if chunk.usage else []
        return out

    def _choice(self, index: int, delta: dict[str, Any], logprobs: ChoiceLogprobs | None = None, reason: str | None = None) -> bytes:
        return self._template.data([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])
