"""Shared parts of this dialect: errors, conversations, settings and usage."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from ...errors import SamplingError
from ...types import SamplingParams, Usage
from .. import sse
from ..errors import APIError, Kind, TooLong, invalid
from ..model_manager.registry import ServedModel
from ..routing import RequestContext
from ..serving import count_chat, encode_chat
from ..shared.reasoning import Thinking
from ..shared.structure import SchemaFormat, structure_refused
from ..shared.tools import Offer
from ..validation import FIRST_ERROR_ONLY, Ignored, StrictModel, Unsupported
from .blocks import CacheControl, Messages, System, cache_marks, for_template
from .tools import AnthropicToolChoice, ThinkingConfig, ToolDefinitions, offer_of, thinking_of

if TYPE_CHECKING:
    from ...engine.text.chat_prompt import ChatPrompt

VERSIONS = ("2023-06-01", "2026-10-21")
"""Values of `anthropic-version`."""
MAX_STOPS = 64
FORMAT = "output_config.format"
"""The field with the constraint on the answer."""
_MAX_CLIENT_ID = 256
"""Characters; the engine's limit."""

KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""A value that Claude Code sends with every conversation. It asks to keep all reasoning, which is the default here."""
OVERLOADED = 529
"""Anthropic's HTTP status for a busy server."""
_SAMPLED = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty")
"""Fields that are sampling parameters with the same name."""
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


class AnthropicErrorDetails(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetails


def error_object(error: APIError) -> AnthropicError:
    """The JSON of an error. The message includes the name of the field at fault."""
    message = error.message
    if isinstance(error, TooLong):  # clients match these words to shorten a conversation and try again
        message = f"prompt is too long: {error.tokens} tokens > {error.context - 1} maximum{error.of_images}"
    return AnthropicError(type="error", error=AnthropicErrorDetails(type=_TYPES.get(error.kind, "invalid_request_error"), message=message))


def error_response(error: APIError) -> Response:
    """The error response."""
    return JSONResponse(error_object(error), OVERLOADED if error.kind == "overloaded" else error.status)


def error_event(error: APIError) -> bytes:
    """The last event of a failed stream; clients raise it."""
    return sse.event("error", error_object(error))


class Metadata(StrictModel):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class OutputConfig(StrictModel):
    """`effort` is the reasoning effort if `thinking` is adaptive. Claude Code sends it with every request."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None
    task_budget: Annotated[Any, Unsupported()] = None


class ConversationRequest(StrictModel):
    """Fields of both endpoints. From `context_management` on only the neutral values are supported."""

    model: Annotated[str, Field(max_length=256)]
    messages: Messages
    system: System | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: ToolDefinitions | None = None  # type: ignore[valid-type]
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    context_management: Annotated[Any, Unsupported({}, {"edits": []}, KEEP_THINKING)] = None
    mcp_servers: Annotated[Any, Unsupported([])] = None
    speed: Annotated[Any, Unsupported("standard")] = None
    user_profile_id: Annotated[Any, Unsupported()] = None
    workspace_id: Annotated[Any, Unsupported()] = None

    def wanted_thinking(self) -> Thinking:
        """The reasoning settings of the request. Raises `APIError`."""
        return thinking_of(self.thinking, self.output_config.effort if self.output_config else None)

    @property
    def omits_thinking(self) -> bool:
        """True if answers report reasoning without its text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    async def prompt(self, context: RequestContext, served: ServedModel) -> ChatPrompt:
        """The rendered conversation. Raises `APIError`."""
        return await encode_chat(context, served, *self._parts(served))

    async def count(self, context: RequestContext, served: ServedModel) -> int:
        """Tokens of the rendered conversation. Raises `APIError`."""
        return await count_chat(context, served, *self._parts(served))

    def _parts(self, served: ServedModel) -> tuple[list[dict[str, Any]], Offer, dict[str, Any]]:
        """Messages, tools and variables for the chat template. Raises `APIError`."""
        offer = offer_of(self.tools or (), self.tool_choice)
        return for_template(self.system, self.messages), offer, self.wanted_thinking().variables(served)

    @property
    def reports_cached(self) -> bool:
        """True if `usage` reports cached tokens separately. Only clients that mark something for the cache expect this."""
        marked = any(tool.cache_control for tool in self.tools or ()) or any(True for _ in cache_marks(self.system, self.messages))
        return self.cache_control is not None or marked


class MessageRequest(ConversationRequest):
    """The body of `POST /v1/messages`. Anthropic's API has `temperature`, `top_p` and `top_k` in its first version only, and none of the
    later fields. All of them work in both versions here."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[str], FIRST_ERROR_ONLY, Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, Ignored("all requests have the same priority")] = None
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
        """The model's default parameters with the request's values. Raises `APIError`."""
        if not all(self.stop_sequences or ()):
            raise invalid("stop_sequences: an empty text stops nothing", "stop_sequences", "invalid_value")
        given: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        if self.output_config is not None and self.output_config.format is not None:
            given["structure"] = self.output_config.format.structure(FORMAT)
        try:
            return replace(served.llm.default_params, max_tokens=self.max_tokens, stop=self.stop_sequences, **given)
        except SamplingError as error:
            raise structure_refused(error, FORMAT) from None

    @property
    def client_id(self) -> str:
        """The user id for fair scheduling. Claude Code's id exceeds the engine's limit, so a long id is hashed."""
        given = (self.metadata and self.metadata.user_id) or ""
        return given if len(given) <= _MAX_CLIENT_ID else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()


def check_version(context: RequestContext) -> None:
    """Raise `APIError` for an unknown version of the API. The header may be missing, because supported fields mean the same in both
    versions. `anthropic-beta` is ignored: the features that it enables have their own fields, and unknown fields are refused."""
    version = context.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise invalid(f"anthropic-version: {version[:32]!r} is not supported, only {known}", "anthropic-version", "invalid_value")


class MessageUsage(TypedDict):
    """The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


def usage_of(usage: Usage, reports_cached: bool) -> MessageUsage:
    """The usage of an answer in the shape of this dialect."""
    cached = usage.stats.reused_tokens if reports_cached else 0
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
