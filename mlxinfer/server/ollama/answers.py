"""Answers of `/api/chat` and `/api/generate`, complete or as JSON lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...types import Chunk, Completion, ToolCall, Usage
from .. import sse
from ..openai.protocol import ContentLogprob, content_logprobs
from ..routing import RequestContext
from ..serving import GenerateRequest, complete, stream
from ..shared.images import WithTimings, timings_of
from ..shared.tools import GatheredCalls, as_object, as_text
from .protocol import OllamaRequest, error_event


class ReplyHead(WithTimings):
    model: str
    created_at: str


class Reply(ReplyHead):
    """Fields of both endpoints. Durations are in nanoseconds."""

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
    thinking: NotRequired[str]
    context: NotRequired[list[int]]


class AnswerFunction(TypedDict):
    """`index` is the index of the call within the answer, from 0."""

    index: int
    name: str
    arguments: dict[str, Any]


class AnswerCall(TypedDict):
    id: str
    function: AnswerFunction


class OllamaAnswer(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[AnswerCall]]


class ChatReply(Reply):
    message: OllamaAnswer


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """Content of one line."""

    text: str = ""
    thinking: str = ""
    """Reasoning."""
    calls: Sequence[AnswerCall] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


ReplyFields = Callable[[ReplyPiece], dict[str, Any]]
"""Puts a piece into the fields of an endpoint."""


def as_response(piece: ReplyPiece) -> dict[str, Any]:
    """The fields of `/api/generate`."""
    return {"response": piece.text, **({"thinking": piece.thinking} if piece.thinking else {})}


def as_message(piece: ReplyPiece) -> dict[str, Any]:
    """The fields of `/api/chat`."""
    message = OllamaAnswer(role="assistant", content=piece.text)
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.calls:
        message["tool_calls"] = list(piece.calls)
    return {"message": message}


def reply_without_prompt(body: OllamaRequest, fields: ReplyFields, reason: Literal["load", "unload"]) -> ASGIApp:
    """The answer to a request without a prompt, which only loads or unloads the model."""
    reply = {**_reply_head(body), **fields(ReplyPiece()), "done": True, "done_reason": reason}
    return Response(sse.line(reply), media_type=sse.JSON_LINES) if body.streams else JSONResponse(reply)


def _reply_head(body: OllamaRequest) -> ReplyHead:
    """The first fields. The model has the name that the client used."""
    return ReplyHead(model=body.model, created_at=datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"))


class Lines:
    """An answer, complete or as lines. `last_fields(token ids)` gives the fields of the last line besides those of `Reply`."""

    def __init__(
        self,
        context: RequestContext,
        body: OllamaRequest,
        request: GenerateRequest,
        fields: ReplyFields,
        last_fields: Callable[[list[int]], dict[str, Any]] = lambda ids: {},
    ) -> None:
        self._context = context
        self._body = body
        self._request = request
        self._fields = fields
        self._last_fields = last_fields
        self._began = time.monotonic_ns()
        self._token_ids: list[int] = []
        self._calls = GatheredCalls()
        self._called = 0

    async def response(self) -> ASGIApp:
        """The response, streamed if the request asks for a stream."""
        if self._body.streams:
            pieces = stream(self._context, self._request, self.render)
            # Clients parse every line as JSON, so the keep-alive is a line without text.
            alive = sse.line({**_reply_head(self._body), **self._fields(ReplyPiece()), "done": False})
            return sse.Stream(pieces, failed=error_event, limits=self._context.limits, media_type=sse.JSON_LINES, keep_alive=alive)
        (answer,) = await sse.unless_gone(self._context.receive, complete(self._context, self._request))
        return JSONResponse(self.whole(answer))

    def whole(self, answer: Completion) -> dict[str, Any]:
        """The complete reply."""
        piece = self._piece(answer.text, answer.reasoning or "", answer.tool_calls)
        said = {**_reply_head(self._body), **self._fields(piece), **self._logprobs(answer)}
        return {**said, **self._end(answer), **self._last_fields(answer.token_ids)}

    def render(self, chunks: list[Chunk]) -> bytes:
        """Lines of these chunks. A call is sent in one line as soon as it is complete."""
        out = b""
        for chunk in chunks:
            self._token_ids += chunk.token_ids
            calls = self._calls.add(chunk.tool_calls)
            calls += self._calls.end() if chunk.finish_reason else ()
            piece = self._piece(chunk.text, chunk.reasoning, calls)
            if piece or chunk.logprobs:
                out += sse.line({**_reply_head(self._body), **self._fields(piece), **self._logprobs(chunk), "done": False})
            if chunk.finish_reason:
                last = {**self._fields(ReplyPiece()), **self._end(chunk), **self._last_fields(self._token_ids)}
                out += sse.line({**_reply_head(self._body), **last})
        return out

    def _piece(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> ReplyPiece:
        """A piece. A call that broke off becomes text, because arguments are objects in this API."""
        found: list[AnswerCall] = []
        for call in calls:
            arguments = as_object(call.arguments)
            if arguments is None:
                text += as_text(call.name, call.arguments)
            else:
                found.append(AnswerCall(id=call.id, function=AnswerFunction(index=self._called, name=call.name, arguments=arguments)))
                self._called += 1
        return ReplyPiece(text, thinking, found)

    def _logprobs(self, part: Chunk | Completion) -> dict[str, Any]:
        if not part.logprobs:
            return {}
        return {"logprobs": content_logprobs(self._request.served.llm.tokenizer, part.logprobs)}

    def _end(self, last: Chunk | Completion) -> dict[str, Any]:
        usage = last.usage or Usage(len(self._request.token_ids), 0)
        return {
            "done": True,
            "done_reason": last.finish_reason,
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": round(self._context.log.get("load_ms", 0) * 1e6),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(usage.stats.prefill_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(usage.stats.decode_s * 1e9),
            **timings_of((usage,)),
        }
