"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from typing import Any, Literal, Union

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...types import Chunk, Completion, ToolCall, ToolCallDelta, Usage
from .. import sse
from ..errors import TooLong
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, stream
from ..shared.images import WithTimings, timings_of
from ..shared.tools import as_object, as_text
from .protocol import FORMAT, OVERLOADED, ConversationRequest, MessageRequest, MessageUsage, check_version, error_event, usage_of
from .tools import anthropic_call_id

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

PING = sse.event("ping", {"type": "ping"})
SIGNATURE = "bWx4aW5mZXI="
"""Signature of every reasoning block. Clients send it back; it is not checked."""


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockContent = Union[TextContent, ThinkingContent, ToolUseContent]


class MessageObject(WithTimings):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageAnswer:
    """One message. It has at least one block, which may be an empty text."""

    def __init__(self, request: GenerateRequest, *, reports_cached: bool, omits_thinking: bool) -> None:
        """`omits_thinking`: reasoning blocks are sent empty."""
        self._request = request
        self._reports_cached = reports_cached
        self._omits_thinking = omits_thinking
        self._id = f"msg_{uuid.uuid4().hex}"
        self._open: str | None = None
        self._blocks = 0
        self._called = False

    def whole(self, answer: Completion) -> MessageObject:
        """The complete response."""
        content: list[BlockContent] = []
        if answer.reasoning:
            thinking = "" if self._omits_thinking else answer.reasoning
            content.append(ThinkingContent(type="thinking", thinking=thinking, signature=SIGNATURE))
        if answer.text:
            content.append(TextContent(type="text", text=answer.text))
        content += map(_tool_block, answer.tool_calls)
        self._called = bool(answer.tool_calls)
        message = self._message(content or [TextContent(type="text", text="")], usage_of(answer.usage, self._reports_cached))
        end = {"stop_reason": self._reason(answer), "stop_sequence": answer.stop_string}
        return {**message, **end, **timings_of((answer.usage,))}  # type: ignore[typeddict-item]

    def _message(self, content: list[BlockContent], usage: MessageUsage) -> MessageObject:
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
            return "stop_sequence" if end.stop_string is not None else "tool_use" if self._called else "end_turn"
        written = end.usage.completion_tokens if end.usage else 0
        return "max_tokens" if written == self._request.params.max_tokens else "model_context_window_exceeded"

    def begin(self) -> bytes:
        """The event before the first block."""
        return _typed_event("message_start", message=self._message([], self._usage_before()))

    def _usage_before(self) -> MessageUsage:
        return usage_of(Usage(len(self._request.token_ids), 0), self._reports_cached)

    def render(self, chunks: list[Chunk]) -> bytes:
        """Events of these chunks."""
        out = b""
        for chunk in chunks:
            out += self._thinking(chunk.reasoning) if chunk.reasoning else b""
            out += self._text(chunk.text) if chunk.text else b""
            out += b"".join(map(self._call, chunk.tool_calls))
            out += self._end(chunk) if chunk.finish_reason else b""
        return out

    def _thinking(self, text: str) -> bytes:
        out = self._within(ThinkingContent(type="thinking", thinking="", signature=""))
        return out if self._omits_thinking else out + self._delta(type="thinking_delta", thinking=text)

    def _text(self, text: str) -> bytes:
        return self._within(TextContent(type="text", text="")) + self._delta(type="text_delta", text=text)

    def _call(self, piece: ToolCallDelta) -> bytes:
        out = b""
        if piece.name is not None:
            self._called = True
            block = ToolUseContent(type="tool_use", id=anthropic_call_id(piece.id or ""), name=piece.name, input={})
            out = self._close() + self._begin(block)
        return out + self._delta(type="input_json_delta", partial_json=piece.arguments) if piece.arguments else out

    def _within(self, block: BlockContent) -> bytes:
        """Events that start a block of this kind, unless one is open."""
        return b"" if self._open == block["type"] else self._close() + self._begin(block)

    def _begin(self, block: BlockContent) -> bytes:
        self._open = block["type"]
        self._blocks += 1
        return _typed_event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close(self) -> bytes:
        """Events that end the open block."""
        if self._open is None:
            return b""
        out = self._delta(type="signature_delta", signature=SIGNATURE) if self._open == "thinking" else b""
        self._open = None
        return out + _typed_event("content_block_stop", index=self._blocks - 1)

    def _delta(self, **delta: str) -> bytes:
        return _typed_event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _end(self, last: Chunk) -> bytes:
        out = b"" if self._blocks else self._within(TextContent(type="text", text=""))
        out += self._close()
        delta = {"stop_reason": self._reason(last), "stop_sequence": last.stop_string}
        usage = usage_of(last.usage, self._reports_cached) if last.usage else self._usage_before()
        timings = timings_of((last.usage,) if last.usage else ())
        return out + _typed_event("message_delta", delta=delta, usage=usage, **timings) + _typed_event("message_stop")


def _tool_block(call: ToolCall) -> BlockContent:
    arguments = as_object(call.arguments)
    if arguments is None:
        return TextContent(type="text", text=as_text(call.name, call.arguments))
    return ToolUseContent(type="tool_use", id=anthropic_call_id(call.id), name=call.name, input=arguments)


def _typed_event(name: str, **values: Any) -> bytes:
    return sse.event(name, {"type": name, **values})


class TokenCount(TypedDict):
    input_tokens: int


class CountRequest(ConversationRequest):
    """The body of `POST /v1/messages/count_tokens`: a conversation without settings for an answer."""


async def create(context: RequestContext, body: MessageRequest) -> ASGIApp:
    check_version(context)
    served = await context.model(body.model)
    params, prompt = body.params(served), await body.prompt(context, served)
    params = body.wanted_thinking().held(params, served, prompt)
    request = GenerateRequest(served, prompt, params, client_id=body.client_id, structure_field=FORMAT)
    answer, streams = MessageAnswer(request, reports_cached=body.reports_cached, omits_thinking=body.omits_thinking), body.stream
    del body  # images have megabytes
    if streams:
        pieces = stream(context, request, answer.render)
        return sse.Stream(pieces, begin=answer.begin(), failed=error_event, limits=context.limits, keep_alive=PING)
    (completion,) = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(answer.whole(completion))


async def count_tokens(context: RequestContext, body: CountRequest) -> ASGIApp:
    check_version(context)
    served = await context.model(body.model)
    context.log["model"] = served.name
    try:
        tokens = await body.count(context, served)
    except TooLong as error:  # clients count to find this out
        tokens = error.tokens
    return JSONResponse(TokenCount(input_tokens=tokens))


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("The next message of a conversation", MessageObject, streams=sse.EVENT_STREAM, statuses=(OVERLOADED,))
    counted = Doc("Tokens of a prompt", TokenCount)
    return [
        Endpoint("POST", "/v1/messages", create, MessageRequest, doc, server=server, images=True),
        Endpoint("POST", "/v1/messages/count_tokens", count_tokens, CountRequest, counted, server=server, images=True),
    ]
