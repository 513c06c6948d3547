"""What the endpoints of this dialect share: errors, conversations, settings and usage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from ...errors import SamplingError
from ...types import SamplingParams, Usage
from .. import sse
from ..errors import APIError, Kind, TooLong, invalid
from ..models import ServedModel
from ..routing import RequestContext
from ..serving import encode_chat
from ..structure import SchemaFormat, refused
from ..validation import FIRST_ERROR_ONLY, Ignored, OneOf, StrictModel, Unsupported, text_or_list

VERSIONS = ("2023-06-01", "2026-10-21")
"""Values of `anthropic-version`."""
MAX_STOPS = 64
FORMAT = "output_config.format"
"""The field that says what an answer is held to."""
_MAX_CLIENT_ID = 256
"""Characters that the engine accepts."""

KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Claude Code sends this with every conversation. All thinking is kept anyway."""
MAX_MESSAGES = 4096
OVERLOADED = 529
"""Anthropic's HTTP status for a busy server."""
_NO_THINKING = ({"type": "disabled"},)
_ADAPTIVE = ({"type": "adaptive"}, *({"type": "adaptive", "display": display} for display in ("summarized", "omitted")))
"""Values of `thinking` that leave it to the model."""
_BETWEEN_TURNS = "\n\n"
"""Joins consecutive turns of the same role."""
_SAMPLED = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty")
"""Fields that are sampling parameters under the same name."""
_TYPES: dict[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "timeout": "timeout_error",
    "overloaded": "overloaded_error",
    "internal": "api_error",
}


class Details(TypedDict):
    type: str
    message: str


class Error(TypedDict):
    type: Literal["error"]
    error: Details


def error_object(error: APIError) -> Error:
    """The JSON of an error. The name of the field at fault is part of the message."""
    message = error.message
    if isinstance(error, TooLong):  # clients that shorten a conversation and try again read these words and numbers
        message = f"prompt is too long: {error.tokens} tokens > {error.context - 1} maximum"
    return Error(type="error", error=Details(type=_TYPES.get(error.kind, "invalid_request_error"), message=message))


def error_response(error: APIError) -> Response:
    """The response to a request that failed."""
    return JSONResponse(error_object(error), OVERLOADED if error.kind == "overloaded" else error.status)


def error_event(error: APIError) -> bytes:
    """The last event of a stream that failed, which clients raise."""
    return sse.event("error", error_object(error))


class CacheControl(StrictModel):
    """Prefixes are cached whether marked or not; the mark only makes `usage` report cached tokens separately. Retention depends on free
    memory, not on `ttl`."""

    type: Annotated[str, OneOf("ephemeral")]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """A block of text. Images, documents, tools and their results are refused by their type."""

    type: Annotated[str, OneOf("text")]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Unsupported([])] = None


class ThinkingBlock(StrictModel):
    """The thinking of an earlier answer, perhaps another model's, which clients send back. The template keeps or drops it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictModel):
    """Encrypted thinking of an earlier answer. It is accepted because clients send it back, and left out."""

    type: Literal["redacted_thinking"]
    data: str


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("thinking", "redacted_thinking") else "<text>"


Block = Annotated[
    Union[
        Annotated[TextBlock, Tag("<text>")],
        Annotated[ThinkingBlock, Tag("<thinking>")],
        Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    ],
    Discriminator(_kind),
]
Content = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[Block], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]
System = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[TextBlock], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class Turn(StrictModel):
    """One message. A `system` message keeps its position, which not every chat template allows in the middle."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def blocks(self) -> list[TextBlock | ThinkingBlock | RedactedThinkingBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


Messages = Annotated[list[Turn], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(system: str | list[TextBlock] | None, messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it. Consecutive turns of the same role are joined, as in the API. Raises `APIError`."""
    for number, message in enumerate(messages):
        if message.role != "assistant" and any(not isinstance(block, TextBlock) for block in message.blocks):
            raise invalid(f"messages[{number}].content: only an assistant's message has thinking", f"messages[{number}].content")
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise invalid(f"{last}: an answer that is begun cannot be continued yet: the last message must not be one", last)
    instructions = system if isinstance(system, str) or system is None else "".join(block.text for block in system)
    turns: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
    for message in messages:
        turn = _turn(message)
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1] = _joined(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def _turn(message: Turn) -> dict[str, Any]:
    blocks = message.blocks
    turn: dict[str, Any] = {"role": message.role, "content": "".join(block.text for block in blocks if isinstance(block, TextBlock))}
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return {**turn, "reasoning_content": thinking} if thinking else turn


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: _BETWEEN_TURNS.join(filter(None, (one.get(name), other.get(name)))) for name in {**one, **other}} | {"role": one["role"]}


def marks(system: str | list[TextBlock] | None, messages: Sequence[Turn]) -> Iterator[CacheControl]:
    """The cache marks of a conversation."""
    texts = [*(system if isinstance(system, list) else ()), *(block for message in messages for block in message.blocks)]
    return (block.cache_control for block in texts if isinstance(block, TextBlock) and block.cache_control)


class Metadata(StrictModel):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class OutputConfig(StrictModel):
    """`effort`, which Claude Code sends with every request, says how long to think; it has no effect, as thinking is not supported yet."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None
    task_budget: Annotated[Any, Unsupported()] = None


class Conversation(StrictModel):
    """What both endpoints accept. Of the fields from `tools` on, only the neutral values are supported so far."""

    model: Annotated[str, Field(max_length=256)]
    messages: Messages
    system: System | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: Annotated[Any, Unsupported([])] = None
    tool_choice: Annotated[Any, Unsupported({"type": "none"}, {"type": "auto"})] = None
    thinking: Annotated[Any, Unsupported(*_NO_THINKING, *_ADAPTIVE)] = None
    context_management: Annotated[Any, Unsupported({}, {"edits": []}, KEEP_THINKING)] = None
    mcp_servers: Annotated[Any, Unsupported([])] = None
    speed: Annotated[Any, Unsupported("standard")] = None
    user_profile_id: Annotated[Any, Unsupported()] = None
    workspace_id: Annotated[Any, Unsupported()] = None

    async def prompt(self, served: ServedModel) -> list[int]:
        """Token ids. Raises `APIError`."""
        variables = {"enable_thinking": False} if self.thinking in _NO_THINKING else {}
        return await encode_chat(served, for_template(self.system, self.messages), **variables)

    @property
    def reports_cached(self) -> bool:
        """Whether `usage` reports cached tokens separately, which only clients that mark something for the cache expect."""
        return self.cache_control is not None or any(True for _ in marks(self.system, self.messages))


class MessageRequest(Conversation):
    """The body of `POST /v1/messages`. The second version of the API has no `temperature`, `top_p` and `top_k`, and the fields after them
    were never Anthropic's; all of them are honoured in both versions."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[str], FIRST_ERROR_ONLY, Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, Ignored("all requests are served alike")] = None
    container: Annotated[Any, Unsupported()] = None
    diagnostics: Annotated[Any, Unsupported()] = None
    inference_geo: Annotated[Any, Unsupported()] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def params(self, served: ServedModel) -> SamplingParams:
        """The model's default parameters, overridden by the request's. Raises `APIError`."""
        if not all(self.stop_sequences or ()):
            raise invalid("stop_sequences: an empty text stops nothing", "stop_sequences", "invalid_value")
        given: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        if self.output_config is not None and self.output_config.format is not None:
            given["structure"] = self.output_config.format.structure(FORMAT)
        try:
            return replace(served.llm.default_params, max_tokens=self.max_tokens, stop=self.stop_sequences, **given)
        except SamplingError as error:
            raise refused(error, FORMAT) from None

    @property
    def client_id(self) -> str:
        """The user that requests are scheduled fairly by. Claude Code's id is longer than what the engine accepts, so it is hashed."""
        given = (self.metadata and self.metadata.user_id) or ""
        return given if len(given) <= _MAX_CLIENT_ID else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()


def check_version(context: RequestContext) -> None:
    """Raises `APIError` for an unknown version of the API. The header may be missing: what is supported means the same in both versions.
    `anthropic-beta` is ignored, since the features that it enables have fields of their own, which are refused if unknown."""
    version = context.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise invalid(f"anthropic-version: {version[:32]!r} is not supported, only {known}", "anthropic-version", "invalid_value")


class MessageUsage(TypedDict):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


def usage_of(usage: Usage, reports_cached: bool) -> MessageUsage:
    """What an answer took, in this dialect's shape."""
    cached = usage.stats.reused_tokens if reports_cached else 0
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
