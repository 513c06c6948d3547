"""What requests of this API have in common, and what they mean to the engine."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ...errors import SamplingError
from ...types import SamplingParams, Usage
from ..answering import encode_chat
from ..fields import FIRST_ERROR_ONLY, Body, Only
from ..models import Served
from ..problems import invalid, of_error
from ..routing import Call
from .content import CacheControl, Messages, System, for_template, marks

VERSIONS = ("2023-06-01", "2026-10-21")
MAX_STOPS = 64
_LONGEST_CLIENT = 256

KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Claude Code sends it with every conversation. All thinking is kept anyway."""


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class OutputConfig(Body):
    """Claude Code sends an `effort` to every model. It says how long to think, and this server does not let models think yet."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Any, Only()] = None
    task_budget: Annotated[Any, Only()] = None


class Conversation(Body):
    """The fields from `tools` on are known, but have only their neutral values so far."""

    model: Annotated[str, Field(max_length=256)]
    messages: Messages
    system: System | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only({"type": "none"}, {"type": "auto"})] = None
    thinking: Annotated[Any, Only({"type": "disabled"})] = None
    context_management: Annotated[Any, Only({}, {"edits": []}, KEEP_THINKING)] = None
    mcp_servers: Annotated[Any, Only([])] = None
    speed: Annotated[Any, Only("standard")] = None
    user_profile_id: Annotated[Any, Only()] = None
    workspace_id: Annotated[Any, Only()] = None

    async def prompt(self, served: Served) -> list[int]:
        """Token ids. Raises `Problem`."""
        variables = {} if self.thinking is None else {"enable_thinking": False}
        return await encode_chat(served, for_template(self.system, self.messages), **variables)

    @property
    def tells_cached(self) -> bool:
        """Whether tokens found in the cache are counted apart: only who asks for caching expects that."""
        return self.cache_control is not None or any(True for _ in marks(self.system, self.messages))


class MessageRequest(Conversation):
    """The last fields are not Anthropic's any more, or never were: `temperature`, `top_p` and `top_k` went with the second version of the
    API, the others are what other engines accept. All are honoured in both versions."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[str], FIRST_ERROR_ONLY, Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, Only("auto", "standard_only")] = None
    container: Annotated[Any, Only()] = None
    diagnostics: Annotated[Any, Only()] = None
    inference_geo: Annotated[Any, Only()] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def params(self, served: Served) -> SamplingParams:
        """The model's own defaults, with what the request says. Raises `Problem`."""
        if not all(self.stop_sequences or ()):
            raise invalid("stop_sequences: an empty text stops nothing", "stop_sequences", "invalid_value")
        given = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        try:
            return replace(served.llm.default_params, max_tokens=self.max_tokens, stop=self.stop_sequences, **given)
        except SamplingError as error:
            raise of_error(error) from None

    @property
    def client_id(self) -> str:
        """Claude Code's is longer than what the engine takes."""
        given = (self.metadata and self.metadata.user_id) or ""
        return given if len(given) <= _LONGEST_CLIENT else hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()


_SAMPLED = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty")


def check_version(call: Call) -> None:
    """Raises `Problem` for a version of the API that this is not; none need be given, as what is supported means the same in both. What
    `anthropic-beta` asks for has fields of its own, which are refused where they are not known."""
    version = call.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " and ".join(VERSIONS)
        raise invalid(f"anthropic-version: {version[:32]!r} is not supported, only {known}", "anthropic-version", "invalid_value")


class MessageUsage(TypedDict):
    """All of `input_tokens` and of those found in the cache (`cache_read_input_tokens`) together are the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


def usage_of(usage: Usage, tells_cached: bool) -> MessageUsage:
    cached = usage.stats.reused_tokens if tells_cached else 0
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
