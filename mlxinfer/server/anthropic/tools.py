"""Tools and reasoning settings in Anthropic's API."""

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
"""Prefixes of call ids, and the prefixes that clients of this API expect."""


class ToolDefinition(StrictModel):
    """A tool that the model may call. Anthropic's server tools, and tools whose schemas only Anthropic's models know, are refused by
    their type."""

    type: Annotated[str, OneOf("custom")] | None = None
    name: Name
    description: str | None = None
    input_schema: SchemaObject
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[Any, Ignored("arguments are streamed as they are written", within="tools[]")] = None
    defer_loading: Annotated[Any, Ignored("all tools are in the prompt", within="tools[]")] = None
    input_examples: Annotated[Any, Ignored("chat templates have no examples", within="tools[]")] = None
    allowed_callers: Annotated[Any, Unsupported([], ["direct"])] = None


class AnthropicToolChoice(StrictModel):
    """`any` requires a call of any tool, `tool` a call of the tool `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def as_tool_choice(self) -> ToolChoice:
        """The choice in the engine's form. Raises `APIError`."""
        if (self.type == "tool") != (self.name is not None):
            raise invalid("tool_choice.name: the type tool needs a name, other types have none", "tool_choice.name", "invalid_value")
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
    """The id of a call in this API's form."""
    found = next((prefix for prefix in _PREFIXES if call_id.startswith(prefix)), "")
    return _PREFIXES.get(found, "") + call_id[len(found) :]


class ThinkingConfig(StrictModel):
    """Reasoning settings: `enabled` with a budget of tokens, `adaptive` with the effort in `output_config.effort`, or `disabled`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


def thinking_of(config: ThinkingConfig | None, effort: Effort | None) -> Thinking:
    """The reasoning settings of a request. As in Anthropic's API, the default is no reasoning, if the template can switch it off. Raises
    `APIError`."""
    if config is None:
        return Thinking(on=False, optional=True)
    if (config.type == "enabled") != (config.budget_tokens is not None):
        field = "thinking.budget_tokens"
        raise invalid(f"{field}: the type enabled needs a number of tokens, other types have none", field, "invalid_value")
    return Thinking(config.type != "disabled", effort if config.type == "adaptive" else None, config.budget_tokens)
