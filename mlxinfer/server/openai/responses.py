"""`POST /v1/responses`: the next message of a conversation, complete or as typed events."""

from __future__ import annotations

import time
import uuid
from functools import cached_property
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...structure import Structure
from ...types import SamplingParams, Usage
from .. import sse
from ..errors import invalid
from ..model_manager.registry import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, encode_chat, stream
from ..shared.images import WithTimings, timings_of
from ..shared.reasoning import Effort, Thinking
from ..shared.structure import SchemaFormat
from ..validation import FIRST_ERROR_ONLY, Ignored, MaxTokens, OneOf, StrictModel, Unsupported, text_or_list
from .extras import VERBOSITY
from .protocol import MAX_TOP_LOGPROBS, SamplingFields, prompt_details
from .response_answers import OutputItem, ResponseEvents
from .response_items import Items, ResponseFunction, ResponseToolChoice, Status, Tools, for_template, offer_of

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""
_ABSENT = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""Values of `include` for parts that answers of this server never have."""
_NO_SUCH_PARTS = Ignored("no answer has such parts", but=(LOGPROBS,))
_NEVER_CUT = Ignored("a conversation that is too long is refused, never cut", but=("disabled",))


class TextConfig(StrictModel):
    format: SchemaFormat | None = None
    verbosity: Annotated[Any, Ignored(VERBOSITY.why, within="text")] = None


class ReasoningConfig(StrictModel):
    """Reasoning settings. With a `summary`, the reasoning is sent as its own summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def sums_up(self) -> bool:
        return self.summary is not None or self.generate_summary is not None


class ResponseRequest(SamplingFields):
    """The body of `POST /v1/responses`. Responses are not stored, whatever `store` says; references to an earlier response are refused."""

    input: Annotated[Union[Annotated[str, Tag("<text>")], Annotated[Items, Tag("<items>")]], Discriminator(text_or_list)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Annotated[str, OneOf(LOGPROBS, *_ABSENT), _NO_SUCH_PARTS]], FIRST_ERROR_ONLY] | None = None
    previous_response_id: Annotated[Any, Unsupported(why="not possible: responses are not kept, send the conversation")] = None
    conversation: Annotated[Any, Unsupported(why="not possible: conversations are not kept, send the messages")] = None
    client_metadata: Annotated[Any, Ignored("nothing is stored")] = None
    background: Annotated[Any, Unsupported(False)] = None
    tools: Tools | None = None  # type: ignore[valid-type]
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[Any, Unsupported()] = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Annotated[str, OneOf("auto", "disabled"), _NEVER_CUT] | None = None
    context_management: Annotated[Any, Unsupported([])] = None
    prompt: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    stream_options: Annotated[Any, Unsupported({}, {"include_obfuscation": False})] = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the form of chat templates. Raises `APIError`."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else for_template(self.input)
        return items if self.instructions is None else [{"role": "system", "content": self.instructions}, *items]

    @cached_property
    def structure(self) -> tuple[str, Structure | None]:
        """See `SamplingFields`."""
        field, given = "text.format", None if self.text is None else self.text.format
        return field, None if given is None else given.structure(field)

    def wanted_logprobs(self) -> int | None:
        """Alternatives per token in the log-probabilities; None means no log-probabilities. Raises `APIError`."""
        wanted = LOGPROBS in (self.include or ())
        if self.top_logprobs and not wanted:
            raise invalid(f"top_logprobs is only for include=[{LOGPROBS!r}]", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if wanted else None


class InputDetails(TypedDict):
    """Prompts without images have no `image_tokens`."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: NotRequired[int]


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(WithTimings):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    background: bool


async def create(context: RequestContext, body: ResponseRequest) -> ASGIApp:
    served = await context.model(body.model, body.keep_alive_s)
    params = body.params(served, body.max_output_tokens, body.wanted_logprobs())
    thinking = Thinking(effort=body.reasoning.effort if body.reasoning else None)
    offer = offer_of(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    prompt = await encode_chat(context, served, body.messages(), offer, thinking.variables(served))
    params = thinking.held(params, served, prompt)
    request = GenerateRequest(
        served, prompt, params, client_id=body.user or "", cache_salt=body.cache_salt or "", structure_field=body.structure[0]
    )
    body = body.model_copy(update={"input": ""})  # images have megabytes
    response = _Response(served, params, body)
    events = ResponseEvents(served.llm.tokenizer, response.render, sums_up=bool(body.reasoning and body.reasoning.sums_up))
    if body.stream:
        pieces = stream(context, request, events.render)
        return sse.Stream(pieces, begin=events.begin(), end=events.end, failed=events.failed, limits=context.limits)
    (answer,) = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(events.whole(answer))


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("An answer to a conversation; it is not stored", ResponseObject, streams=sse.EVENT_STREAM)
    return [Endpoint("POST", "/v1/responses", create, ResponseRequest, doc, server=server, images=True)]


class _Response:
    """Renders the object of one response."""

    def __init__(self, served: ServedModel, params: SamplingParams, body: ResponseRequest) -> None:
        self._served = served
        self._params = params
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())

    def render(self, status: Status, output: list[OutputItem], usage: Usage | None) -> ResponseObject:
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
            reasoning={"effort": None, "summary": None, **_echo(body.reasoning)},
            store=False,
            temperature=params.temperature or 0.0,
            text={"format": _echo(body.text.format if body.text else None) or {"type": "text"}},
            tool_choice=_echo(body.tool_choice) if isinstance(body.tool_choice, StrictModel) else body.tool_choice or "auto",
            tools=[_echo(tool) if isinstance(tool, ResponseFunction) else {"type": tool.type} for tool in body.tools or ()],
            top_p=params.top_p or 1.0,
            top_logprobs=body.top_logprobs or 0,
            truncation="disabled",
            usage=None if usage is None else _response_usage(usage),
            user=body.user,
            metadata={},
            background=False,
            **timings_of(() if usage is None else (usage,)),
        )


def _echo(given: StrictModel | None) -> dict[str, Any]:
    """A field as in the request."""
    return {} if given is None else given.model_dump(by_alias=True, exclude_unset=True)


def _response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cache_write_tokens=0, **prompt_details(usage.stats.reused_tokens, usage.stats.image_tokens)),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
