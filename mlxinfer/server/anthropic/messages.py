"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, stream
from .protocol import FORMAT, OVERLOADED, Conversation, MessageRequest, MessageUsage, check_version, error_event, usage_of

PING = sse.event("ping", {"type": "ping"})
"""Keeps a silent stream alive."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class MessageObject(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


class CountRequest(Conversation):
    """The body of `POST /v1/messages/count_tokens`: a conversation without settings for an answer."""


async def create(context: RequestContext, body: MessageRequest) -> ASGIApp:
    check_version(context)
    served = context.server.models.get(body.model)
    params = body.params(served)
    request = GenerateRequest(served, await body.prompt(served), params, client_id=body.client_id, structure_field=FORMAT)
    message = _Message(request, body.reports_cached)
    if body.stream:
        pieces = stream(context, request, message.render)
        return sse.Stream(pieces, begin=message.begin(), failed=error_event, limits=context.limits, keep_alive=PING)
    (answer,) = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(message.whole(answer))


async def count_tokens(context: RequestContext, body: CountRequest) -> ASGIApp:
    check_version(context)
    served = context.server.models.get(body.model)
    context.log["model"] = served.name
    return JSONResponse(TokenCount(input_tokens=len(await body.prompt(served))))


def routes(server: Server) -> list[Endpoint]:
    """The endpoints of this dialect."""
    doc = Doc("The next message of a conversation", MessageObject, streams=sse.EVENT_STREAM, statuses=(OVERLOADED,))
    counted = Doc("Tokens of a prompt", TokenCount)
    return [
        Endpoint("POST", "/v1/messages", create, MessageRequest, doc, server=server),
        Endpoint("POST", "/v1/messages/count_tokens", count_tokens, CountRequest, counted, server=server),
    ]


class _Message:
    """One message, whole or in events. It has one block of text, even if that is empty."""

    def __init__(self, request: GenerateRequest, reports_cached: bool) -> None:
        self._request = request
        self._reports_cached = reports_cached
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, answer: Completion) -> MessageObject:
        usage = usage_of(answer.usage, self._reports_cached)
        message = self._message([TextContent(type="text", text=answer.text)], usage)
        return {**message, "stop_reason": self._reason(answer), "stop_sequence": answer.stop_string}

    def _message(self, content: list[TextContent], usage: MessageUsage) -> MessageObject:
        return MessageObject(
            id=self._id,
            type="message",
            role="assistant",
            model=self._request.served.name,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
        )

    def _reason(self, end: Completion | Chunk) -> StopReason:
        if end.finish_reason != "length":
            return "end_turn" if end.stop_string is None else "stop_sequence"
        written = end.usage.completion_tokens if end.usage else 0
        return "max_tokens" if written == self._request.params.max_tokens else "model_context_window_exceeded"

    def begin(self) -> bytes:
        """The events before the first text."""
        start = self._message([], usage_of(Usage(len(self._request.prompt), 0), self._reports_cached))
        block = TextContent(type="text", text="")
        return _event("message_start", message=start) + _event("content_block_start", index=0, content_block=block)

    def render(self, chunks: list[Chunk]) -> bytes:
        """The events of these chunks."""
        out = b""
        for chunk in chunks:
            out += self._text(chunk.text) if chunk.text else b""
            out += self._end(chunk) if chunk.finish_reason else b""
        return out

    def _text(self, text: str) -> bytes:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def _end(self, last: Chunk) -> bytes:
        delta = {"stop_reason": self._reason(last), "stop_sequence": last.stop_string}
        usage = usage_of(last.usage or Usage(len(self._request.prompt), 0), self._reports_cached)
        return _event("content_block_stop", index=0) + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")


def _event(name: str, **values: Any) -> bytes:
    return sse.event(name, {"type": name, **values})
