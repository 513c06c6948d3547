"""Tools in Anthropic's API: what a request offers, and how much it wants the model to think."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...tools import ToolChoice
from ..errors import invalid
from ..shared.reasoning import Effort, Thinking
from ..shared.tools import Name, Offer, SchemaObject, make_offer, tool_from, tools_field
from ..validation import Ignored, OneOf, StrictModel, Unsupported
from .blocks import CacheControl

_PREFIXES = {"call_": "toolu_"}
"""Beginnings of the ids of calls, and what clients of this API expect instead."""


class ToolDefinition(StrictModel):
    """What a model may call. Tools that Anthropic's own servers run, or whose schemas only its models know, are refused by their type."""

    type: Annotated[str, OneOf("custom")] | None = None
    name: Name
    description: str | None = None
    input_schema: SchemaObject
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[Any, Ignored("arguments are streamed as they are written", within="tools[]")] = None
    defer_loading: Annotated[Any, Ignored("all tools are in the prompt", within="tools[]")] = None
    input_examples: Annotated[Any, Ignored("chat templates take no examples", within="tools[]")] = None
    allowed_callers: Annotated[Any, Unsupported([], ["direct"])] = None


class AnthropicToolChoice(StrictModel):
    """`any` asks for a call of some tool, `tool` for one of the tool `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def as_tool_choice(self) -> ToolChoice:
        """Raises `APIError`."""
        if (self.type == "tool") != (self.name is not None):
            raise invalid("tool_choice.name: the tool's name is for the type tool, which needs it", "tool_choice.name", "invalid_value")
        parallel = self.type != "tool" if self.disable_parallel_tool_use is None else not self.disable_parallel_tool_use
        if self.type == "tool" or self.type == "any":
            return ToolChoice("required", self.name, parallel)
        return ToolChoice(self.type, parallel=parallel)


ToolDefinitions = tools_field(ToolDefinition)


def offer_of(tools: Sequence[ToolDefinition], choice: AnthropicToolChoice | None) -> Offer:
    """The tools of a request. Raises `APIError`."""
    made = [
        tool_from(f"tools[{number}].input_schema", tool.name, tool.description, tool.input_schema, tool.strict)
        for number, tool in enumerate(tools)
    ]
    return make_offer("tools", made, ToolChoice() if choice is None else choice.as_tool_choice())


def anthropic_call_id(call_id: str) -> str:
    """The id of a call as this API writes it."""
    found = next((prefix for prefix in _PREFIXES if call_id.startswith(prefix)), "")
    return _PREFIXES.get(found, "") + call_id[len(found) :]


class ThinkingConfig(StrictModel):
    """How much to think: `enabled` with a number of tokens, `adaptive` as much as `output_config.effort` says, or `disabled`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


def thinking_of(config: ThinkingConfig | None, effort: Effort | None) -> Thinking:
    """What a request says about thinking. Without a word about it there is none, as in the API, if the template has a switch for it.
    Raises `APIError`."""
    if config is None:
        return Thinking(on=False, optional=True)
    if (config.type == "enabled") != (config.budget_tokens is not None):
        field = "thinking.budget_tokens"
        raise invalid(f"{field}: a number of tokens is for the type enabled, which needs it", field, "invalid_value")
    return Thinking(config.type != "disabled", effort if config.type == "adaptive" else None, config.budget_tokens)
