"""`POST /v1/responses`: one message in answer to a conversation, whole or as typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from ...types import Chunk, SamplingParams, TokenLogprob, Usage
from .. import sse
from ..answering import Ask, bursts, collect, encode_chat
from ..models import Served
from ..problems import Problem
from ..routing import Call, Doc, Endpoint, Server
from .logprobs import ContentLogprob, content_logprobs
from .responses_schema import InputDetails, Message, OutputDetails, OutputText, ResponseObject, ResponseRequest, ResponseUsage

Status = Literal["in_progress", "completed", "incomplete"]


async def create(call: Call, body: ResponseRequest) -> ASGIApp:
    served = call.server.models.get(body.model)
    params = body.params(served, body.max_output_tokens, body.wanted_logprobs())
    prompt = await encode_chat(served, body.messages())
    ask = Ask(served, prompt, params, client_id=body.user or "")
    made = _Made(served, params, body)
    if body.stream:
        events = _Events(made)
        return sse.Stream(events.pieces(call, ask), failed=events.failed, limits=call.server.settings.limits)
    (answer,) = await sse.unless_gone(call.receive, collect(call, ask))
    return JSONResponse(made.ended(answer.text, answer.logprobs or (), answer.finish_reason, answer.usage))


class _Made:
    """The objects that describe one response."""

    def __init__(self, served: Served, params: SamplingParams, body: ResponseRequest) -> None:
        self._served = served
        self._params = params
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.item_id = f"msg_{uuid.uuid4().hex}"

    def begun(self) -> ResponseObject:
        return self._response("in_progress", [], None)

    def ended(self, text: str, logprobs: Sequence[TokenLogprob], reason: str, usage: Usage | None) -> ResponseObject:
        status = status_of(reason)
        return self._response(status, [self.message(status, [self.part(text, self.logprobs(logprobs))])], usage)

    def message(self, status: Status, content: list[OutputText]) -> Message:
        return Message(id=self.item_id, type="message", role="assistant", status=status, content=content)

    def part(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> OutputText:
        return OutputText(type="output_text", text=text, annotations=[], logprobs=list(logprobs))

    def logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[ContentLogprob]:
        return content_logprobs(self._served.llm.tokenizer, logprobs)

    def _response(self, status: Status, output: list[Message], usage: Usage | None) -> ResponseObject:
        body, params = self._body, self._params
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._served.name,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={"effort": None, "summary": None},
            store=False,
            temperature=params.temperature,
            text={"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=[],
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            truncation="disabled",
            usage=None if usage is None else _usage(usage),
            user=body.user,
            metadata={},
            background=False,
        )


def status_of(reason: str) -> Status:
    return "incomplete" if reason == "length" else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.stats.reused_tokens, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=0),
        total_tokens=usage.total_tokens,
    )


class _Events:
    """A response as it comes to be, in numbered events."""

    def __init__(self, made: _Made) -> None:
        self._made = made
        self._number = 0

    async def pieces(self, call: Call, ask: Ask) -> AsyncGenerator[bytes, None]:
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        reason, usage = "stop", None
        begun = False
        async with aclosing(bursts(call, ask)) as incoming:
            async for burst in incoming:
                out = b"" if begun else self._begin()
                begun = True
                for chunk in burst:
                    texts.append(chunk.text)
                    logprobs += chunk.logprobs or ()
                    out += self._delta(chunk) if chunk.text or chunk.logprobs else b""
                    if chunk.finish_reason:
                        reason, usage = chunk.finish_reason, chunk.usage
                yield out
        yield self._end("".join(texts), logprobs, reason, usage)

    def _delta(self, chunk: Chunk) -> bytes:
        return self._text("response.output_text.delta", delta=chunk.text, logprobs=self._made.logprobs(chunk.logprobs or ()))

    def failed(self, problem: Problem) -> bytes:
        return self._event("error", code=problem.code, message=problem.message, param=problem.param)

    def _begin(self) -> bytes:
        made = self._made
        response, item = made.begun(), made.message("in_progress", [])
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._text("response.content_part.added", part=made.part("")),
            ]
        )

    def _end(self, text: str, logprobs: Sequence[TokenLogprob], reason: str, usage: Usage | None) -> bytes:
        response = self._made.ended(text, logprobs, reason, usage)
        (item,) = response["output"]
        (part,) = item["content"]
        return b"".join(
            [
                self._text("response.output_text.done", text=text, logprobs=part["logprobs"]),
                self._text("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{response['status']}", response=response),
            ]
        )

    def _text(self, name: str, **values: Any) -> bytes:
        return self._event(name, item_id=self._made.item_id, output_index=0, content_index=0, **values)

    def _event(self, name: str, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event(name, {"type": name, "sequence_number": number, **values})


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("An answer to a conversation, which is not kept", ResponseObject, streams=sse.EVENT_STREAM)
    return [Endpoint("POST", "/v1/responses", create, ResponseRequest, doc, server=server)]
