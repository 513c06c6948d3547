"""What a model may call: plain values, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import PromptError
from .structure import Schema

_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may ask for. Raises `PromptError` for what is none."""

    name: str
    """What the model calls it by."""
    description: str = ""
    """What it does, for the model."""
    parameters: Schema = field(default_factory=lambda: Schema({"type": "object", "properties": {}}))
    """JSON Schema of its arguments, which are an object."""
    strict: bool = False
    """Whether arguments must fit the schema. A schema that cannot be held is refused then; otherwise any JSON object is accepted."""
    function: Callable[..., Any] | None = None
    """What runs it, where it was made from a Python function."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _LONGEST_NAME:
            raise PromptError(f"tools: a tool's name must be a text of 1 to {_LONGEST_NAME} characters, not {self.name!r:.100}")

    def as_openai(self) -> dict[str, Any]:
        """As chat templates take it: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    """"auto" leaves it to the model, "required" asks for one call at least, "none" offers no tool."""
    name: str | None = None
    """With "required": the only tool that may be called."""
    parallel: bool = True
    """Whether an answer may have more than one call."""


Tools = Mapping[str, Tool]
"""The offered tools by name, in order."""
