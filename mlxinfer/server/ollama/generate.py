"""`POST /api/generate` and `POST /api/chat`: an answer to a prompt or to a conversation, whole or in lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..errors import invalid, unsupported
from ..models import ServedModel
from ..openai.protocol import ContentLogprob, content_logprobs
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, encode_chat, encode_text, stream
from ..validation import FIRST_ERROR_ONLY, Ids, StrictModel, Unsupported
from .models import find
from .protocol import Options, Request, error_event

MAX_MESSAGES = 4096

TextField = Callable[[str], dict[str, Any]]
"""Puts a text into the field that the endpoint has for it."""


class OllamaGenerateRequest(Request):
    """The body of `POST /api/generate`. `context` is what an earlier answer returned: the tokens of its prompt and of itself, which go
    before this prompt."""

    prompt: str | None = None
    system: str | None = None
    context: Annotated[Ids, Field(max_length=2**20)] | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Unsupported("")] = None
    template: Annotated[Any, Unsupported("")] = None
    images: Annotated[Any, Unsupported([])] = None
    width: Annotated[Any, Unsupported(0)] = None
    height: Annotated[Any, Unsupported(0)] = None
    steps: Annotated[Any, Unsupported(0)] = None


class OllamaMessage(StrictModel):
    """`thinking` of earlier answers goes to the template, which keeps or drops it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[Any, Unsupported([])] = None
    tool_calls: Annotated[Any, Unsupported([])] = None
    tool_name: Annotated[Any, Unsupported("")] = None
    tool_call_id: Annotated[Any, Unsupported("")] = None


class OllamaChatRequest(Request):
    """The body of `POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], FIRST_ERROR_ONLY, Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Any, Unsupported([])] = None


class Head(TypedDict):
    model: str
    created_at: str


class Reply(Head):
    """What both endpoints answer. Durations are in nanoseconds."""

    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[ContentLogprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class GenerateReply(Reply):
    response: str
    context: NotRequired[list[int]]


class OllamaAnswer(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatReply(Reply):
    message: OllamaAnswer


async def generate(context: RequestContext, body: OllamaGenerateRequest) -> ASGIApp:
    served = find(context.server.models, body.model)
    logprobs = body.wanted_logprobs()
    if not body.prompt:
        return _loaded(body, _as_response)
    prompt = await _prompt(served, body, body.prompt)
    params = (body.options or Options()).params(served, len(prompt), logprobs, body.structure())

    def last_fields(answer: list[int]) -> dict[str, Any]:
        return {} if body.raw else {"context": prompt + answer}

    return await _Lines(
        context, body, GenerateRequest(served, prompt, params, structure_field="format"), _as_response, last_fields
    ).response()


async def chat(context: RequestContext, body: OllamaChatRequest) -> ASGIApp:
    served = find(context.server.models, body.model)
    logprobs = body.wanted_logprobs()
    if not body.messages:
        return _loaded(body, _as_message)
    prompt = await encode_chat(served, _for_template(body.messages), **body.variables)
    params = (body.options or Options()).params(served, len(prompt), logprobs, body.structure())
    return await _Lines(context, body, GenerateRequest(served, prompt, params, structure_field="format"), _as_message).response()


def routes(server: Server) -> list[Endpoint]:
    """The endpoints of this module."""
    answer = Doc("An answer to a prompt", GenerateReply, streams=sse.JSON_LINES)
    message = Doc("The next message of a conversation", ChatReply, streams=sse.JSON_LINES)
    return [
        Endpoint("POST", "/api/generate", generate, OllamaGenerateRequest, answer, server=server, any_type=True),
        Endpoint("POST", "/api/chat", chat, OllamaChatRequest, message, server=server, any_type=True),
    ]


async def _prompt(served: ServedModel, body: OllamaGenerateRequest, text: str) -> list[int]:
    """Token ids. Raises `APIError`."""
    if body.raw:
        for name in ("system", "context"):
            if getattr(body, name):
                raise invalid(f"{name} is only for prompts that are not raw", name, "invalid_value")
        return await encode_text(served, text)
    system = [{"role": "system", "content": body.system}] if body.system else []
    ids = await encode_chat(served, [*system, {"role": "user", "content": text}], **body.variables)
    if not body.context:
        return ids
    has_bos = ids[:1] == [served.llm.tokenizer.bos_token_id]
    return [*body.context, *(ids[1:] if has_bos else ids)]


def _for_template(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it. Raises `APIError`."""
    plain = [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise unsupported(last, f"{last}: to continue an answer that is begun is not supported yet: the last message must not be one")
    return plain


def _plain(message: OllamaMessage, where: str) -> dict[str, Any]:
    if message.role == "tool":
        raise unsupported(f"{where}.role", f"{where}.role: tools are not supported yet")
    plain = {"role": message.role, "content": message.content or ""}
    if message.thinking is None or message.thinking == "":
        return plain
    if message.role != "assistant":
        raise invalid(f"{where}.thinking: only an assistant's message has it", f"{where}.thinking", "invalid_value")
    return {**plain, "reasoning_content": message.thinking}


def _as_response(text: str) -> dict[str, Any]:
    return {"response": text}


def _as_message(text: str) -> dict[str, Any]:
    return {"message": OllamaAnswer(role="assistant", content=text)}


def _head(body: Request) -> Head:
    """The model is called by the name that the client used for it."""
    return Head(model=body.model, created_at=datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"))


def _loaded(body: Request, text_field: TextField) -> ASGIApp:
    """The answer to a request without a prompt, which only loads the model."""
    reply = {**_head(body), **text_field(""), "done": True, "done_reason": "load"}
    return Response(sse.line(reply), media_type=sse.JSON_LINES) if body.streams else JSONResponse(reply)


class _Lines:
    """An answer, whole or in lines. `last_fields(token ids)` gives what the last line has besides `Reply`."""

    def __init__(
        self,
        context: RequestContext,
        body: Request,
        request: GenerateRequest,
        text_field: TextField,
        last_fields: Callable[[list[int]], dict[str, Any]] = lambda ids: {},
    ) -> None:
        self._context = context
        self._body = body
        self._request = request
        self._text_field = text_field
        self._last_fields = last_fields
        self._began = time.monotonic_ns()
        self._token_ids: list[int] = []

    async def response(self) -> ASGIApp:
        """The response, streamed if the request wants it."""
        if self._body.streams:
            pieces = stream(self._context, self._request, self._render)
            # Clients read every line as JSON, so a line without text keeps the connection alive.
            alive = sse.line({**_head(self._body), **self._text_field(""), "done": False})
            return sse.Stream(pieces, failed=error_event, limits=self._context.limits, media_type=sse.JSON_LINES, keep_alive=alive)
        (answer,) = await sse.unless_gone(self._context.receive, complete(self._context, self._request))
        text = {**_head(self._body), **self._text_field(answer.text), **self._logprobs(answer)}
        return JSONResponse({**text, **self._end(answer), **self._last_fields(answer.token_ids)})

    def _render(self, chunks: list[Chunk]) -> bytes:
        out = b""
        for chunk in chunks:
            self._token_ids += chunk.token_ids
            if chunk.text or chunk.logprobs:
                out += sse.line({**_head(self._body), **self._text_field(chunk.text), **self._logprobs(chunk), "done": False})
            if chunk.finish_reason:
                last = {**self._text_field(""), **self._end(chunk), **self._last_fields(self._token_ids)}
                out += sse.line({**_head(self._body), **last})
        return out

    def _logprobs(self, part: Chunk | Completion) -> dict[str, Any]:
        if not part.logprobs:
            return {}
        return {"logprobs": content_logprobs(self._request.served.llm.tokenizer, part.logprobs)}

    def _end(self, last: Chunk | Completion) -> dict[str, Any]:
        usage = last.usage or Usage(len(self._request.prompt), 0)
        return {
            "done": True,
            "done_reason": last.finish_reason,
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(usage.stats.prefill_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(usage.stats.decode_s * 1e9),
        }
