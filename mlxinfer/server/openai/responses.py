"""`POST /v1/responses`: the next message of a conversation, whole or in typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...structure import Structure
from ...types import Chunk, SamplingParams, TokenLogprob, Usage
from .. import sse
from ..errors import APIError, invalid
from ..models import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, encode_chat, stream
from ..structure import SchemaFormat
from ..validation import FIRST_ERROR_ONLY, Ignored, MaxTokens, OneOf, StrictModel, Unsupported, text_or_list
from .extras import VERBOSITY
from .protocol import MAX_MESSAGES, MAX_TOP_LOGPROBS, ContentLogprob, Sampled, content_logprobs

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
_ABSENT = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""Values of `include` that ask for more about what no answer has here."""
_NO_SUCH_PARTS = Ignored("no answer has such parts", but=(LOGPROBS,))
_NEVER_CUT = Ignored("a conversation that is too long is refused, never cut", but=("disabled",))


class Part(StrictModel):
    """A part of a message's content. `annotations` and `logprobs` of an earlier answer may be sent back; they are ignored."""

    type: Annotated[str, OneOf("input_text", "output_text")]
    text: str
    annotations: Annotated[Any, Unsupported([])] = None
    logprobs: list[Any] | None = None


_Content = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[Part], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class Item(StrictModel):
    """A message of the conversation. An answer may be sent back as it came, with `id`, `status` and `phase`."""

    type: Annotated[str, OneOf("message")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Annotated[Any, Ignored("what an assistant said is one text", within="input[]")] = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


_Items = Annotated[list[Item], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


class TextConfig(StrictModel):
    format: SchemaFormat | None = None
    verbosity: Annotated[Any, Ignored(VERBOSITY.why, within="text")] = None


class Reasoning(StrictModel):
    effort: Annotated[Any, Unsupported("none")] = None
    summary: Annotated[Any, Ignored("thinking is not summed up", within="reasoning")] = None
    generate_summary: Annotated[Any, Ignored("thinking is not summed up", within="reasoning")] = None


class ResponseRequest(Sampled):
    """The body of `POST /v1/responses`. Responses are not stored, whatever `store` says, and what refers to an earlier response is
    refused."""

    input: Annotated[Union[Annotated[str, Tag("<text>")], Annotated[_Items, Tag("<items>")]], Discriminator(text_or_list)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Annotated[str, OneOf(LOGPROBS, *_ABSENT), _NO_SUCH_PARTS]], FIRST_ERROR_ONLY] | None = None
    previous_response_id: Annotated[Any, Unsupported(why="not possible: responses are not kept, send the conversation")] = None
    conversation: Annotated[Any, Unsupported(why="not possible: conversations are not kept, send the messages")] = None
    client_metadata: Annotated[Any, Ignored("nothing is kept")] = None
    background: Annotated[Any, Unsupported(False)] = None
    tools: Annotated[Any, Unsupported([])] = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Unsupported(True, False)] = None
    max_tool_calls: Annotated[Any, Unsupported()] = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Annotated[str, OneOf("auto", "disabled"), _NEVER_CUT] | None = None
    context_management: Annotated[Any, Unsupported([])] = None
    prompt: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    stream_options: Annotated[Any, Unsupported({}, {"include_obfuscation": False})] = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [item.plain() for item in self.input]
        return items if self.instructions is None else [{"role": "system", "content": self.instructions}, *items]

    @cached_property
    def structure(self) -> tuple[str, Structure | None]:
        """See `Sampled`."""
        field, given = "text.format", None if self.text is None else self.text.format
        return field, None if given is None else given.structure(field)

    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token whose log-probabilities are returned; None is no log-probabilities. Raises `APIError`."""
        wanted = LOGPROBS in (self.include or ())
        if self.top_logprobs and not wanted:
            raise invalid(f"top_logprobs is only for include=[{LOGPROBS!r}]", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if wanted else None


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: Sequence[ContentLogprob]


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Message]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_p: float
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    background: bool


async def create(context: RequestContext, body: ResponseRequest) -> ASGIApp:
    served = context.server.models.get(body.model)
    params = body.params(served, body.max_output_tokens, body.wanted_logprobs())
    prompt = await encode_chat(served, body.messages())
    request = GenerateRequest(served, prompt, params, client_id=body.user or "", structure_field=body.structure[0])
    objects = _Objects(served, params, body)
    if body.stream:
        events = _Events(objects)
        pieces = stream(context, request, events.render)
        return sse.Stream(pieces, begin=events.begin(), end=events.end, failed=events.failed, limits=context.limits)
    (answer,) = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(objects.finished(answer.text, answer.logprobs or (), answer.finish_reason, answer.usage))


def routes(server: Server) -> list[Endpoint]:
    """The endpoint of this module."""
    doc = Doc("An answer to a conversation, which is not kept", ResponseObject, streams=sse.EVENT_STREAM)
    return [Endpoint("POST", "/v1/responses", create, ResponseRequest, doc, server=server)]


class _Objects:
    """The JSON objects that describe one response."""

    def __init__(self, served: ServedModel, params: SamplingParams, body: ResponseRequest) -> None:
        self._served = served
        self._params = params
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.item_id = f"msg_{uuid.uuid4().hex}"

    def started(self) -> ResponseObject:
        return self._response("in_progress", [], None)

    def finished(self, text: str, logprobs: Sequence[TokenLogprob], reason: str, usage: Usage | None) -> ResponseObject:
        status = _status(reason)
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
            temperature=params.temperature or 0.0,
            text={"format": _format(body)},
            tool_choice=body.tool_choice or "auto",
            tools=[],
            top_p=params.top_p or 1.0,
            top_logprobs=body.top_logprobs or 0,
            truncation="disabled",
            usage=None if usage is None else _usage(usage),
            user=body.user,
            metadata={},
            background=False,
        )


def _format(body: ResponseRequest) -> dict[str, Any]:
    """The format as it was asked for."""
    given = None if body.text is None else body.text.format
    return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_unset=True)


def _status(reason: str) -> Status:
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
    """The events of one response, which are numbered."""

    def __init__(self, objects: _Objects) -> None:
        self._objects = objects
        self._number = 0
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Chunk | None = None

    def begin(self) -> bytes:
        """The events before the first text."""
        response, item = self._objects.started(), self._objects.message("in_progress", [])
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._text("response.content_part.added", part=self._objects.part("")),
            ]
        )

    def render(self, chunks: list[Chunk]) -> bytes:
        """The events of these chunks."""
        out = b""
        for chunk in chunks:
            self._texts.append(chunk.text)
            self._logprobs += chunk.logprobs or ()
            self._last = chunk
            if chunk.text or chunk.logprobs:
                logprobs = self._objects.logprobs(chunk.logprobs or ())
                out += self._text("response.output_text.delta", delta=chunk.text, logprobs=logprobs)
        return out

    def end(self) -> bytes:
        """The events after the last text."""
        text, last = "".join(self._texts), self._last
        reason, usage = (last.finish_reason or "stop", last.usage) if last else ("stop", None)
        response = self._objects.finished(text, self._logprobs, reason, usage)
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

    def failed(self, error: APIError) -> bytes:
        """The last event of a stream that failed."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _text(self, name: str, **values: Any) -> bytes:
        return self._event(name, item_id=self._objects.item_id, output_index=0, content_index=0, **values)

    def _event(self, name: str, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event(name, {"type": name, "sequence_number": number, **values})
