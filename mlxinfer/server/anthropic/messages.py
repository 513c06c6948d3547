"""`POST /v1/messages`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, bursts, collect, patiently
from .protocol import OVERLOADED, Conversation, MessageRequest, MessageUsage, check_version, piece, usage_of

PING = sse.event("ping", {"type": "ping"})

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


async def create(call: RequestContext, body: MessageRequest) -> ASGIApp:
    check_version(call)
    served = call.server.models.get(body.model)
    params = body.params(served)
    ask = GenerateRequest(served, await body.prompt(served), params, client_id=body.client_id)
    reply = _Reply(ask, body.tells_cached)
    if body.stream:
        return sse.Stream(reply.events(call), failed=piece, limits=call.server.settings.limits, keep_alive=PING)
    (answer,) = await sse.unless_gone(call.receive, collect(call, ask))
    return JSONResponse(reply.whole(answer))


class _Reply:
    """One message, whole or in events. It has one block of text, also where that is empty."""

    def __init__(self, ask: GenerateRequest, tells_cached: bool) -> None:
        self._ask = ask
        self._tells_cached = tells_cached
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, answer: Completion) -> MessageObject:
        usage = usage_of(answer.usage, self._tells_cached)
        message = self._message([TextContent(type="text", text=answer.text)], usage)
        return {**message, "stop_reason": self._reason(answer), "stop_sequence": answer.stop_string}

    def _message(self, content: list[TextContent], usage: MessageUsage) -> MessageObject:
        return MessageObject(
            id=self._id,
            type="message",
            role="assistant",
            model=self._ask.served.name,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
        )

    def _reason(self, end: Completion | Chunk) -> StopReason:
        if end.finish_reason != "length":
            return "end_turn" if end.stop_string is None else "stop_sequence"
        written = end.usage.completion_tokens if end.usage else 0
        return "max_tokens" if written == self._ask.params.max_tokens else "model_context_window_exceeded"

    async def events(self, call: RequestContext) -> AsyncGenerator[bytes, None]:
        """The beginning is not kept waiting for the prompt to be read, so that pings come after it."""
        begun = False
        async with aclosing(patiently(bursts(call, self._ask), call.server.settings.limits.patience_s)) as incoming:
            async for burst in incoming:
                out = b"" if begun else self._begin()
                begun = True
                for chunk in burst or ():
                    out += self._text(chunk.text) if chunk.text else b""
                    out += self._end(chunk) if chunk.finish_reason else b""
                yield out

    def _begin(self) -> bytes:
        start = self._message([], usage_of(Usage(len(self._ask.prompt), 0), self._tells_cached))
        block = TextContent(type="text", text="")
        return _event("message_start", message=start) + _event("content_block_start", index=0, content_block=block)

    def _text(self, text: str) -> bytes:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def _end(self, last: Chunk) -> bytes:
        delta = {"stop_reason": self._reason(last), "stop_sequence": last.stop_string}
        usage = usage_of(last.usage or Usage(len(self._ask.prompt), 0), self._tells_cached)
        return _event("content_block_stop", index=0) + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")


def _event(name: str, **values: Any) -> bytes:
    return sse.event(name, {"type": name, **values})


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("The next message of a conversation", MessageObject, streams=sse.EVENT_STREAM, statuses=(OVERLOADED,))
    return [
        Endpoint("POST", "/v1/messages", create, MessageRequest, doc, server=server),
        Endpoint("POST", "/v1/messages/count_tokens", count, CountRequest, Doc("Tokens of a prompt", TokenCount), server=server),
    ]


class TokenCount(TypedDict):
    input_tokens: int


class CountRequest(Conversation):
    """A conversation, and nothing on how to go on with it."""


async def count(call: RequestContext, body: CountRequest) -> ASGIApp:
    check_version(call)
    served = call.server.models.get(body.model)
    call.log["model"] = served.name
    return JSONResponse(TokenCount(input_tokens=len(await body.prompt(served))))
