"""Tools that a model may call. Plain values, checked when they are created."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Literal, Union

from ..errors import PromptError, SamplingError, ToolError
from ..structure import Schema
from ..util.dataclass import dataclass

_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. Raises `PromptError` for invalid fields."""

    name: str
    """Name by which the model calls the tool."""
    description: str = ""
    """Purpose of the tool, for the model."""
    parameters: Schema = field(default_factory=lambda: Schema({"type": "object", "properties": {}}))
    """JSON Schema of the arguments, which are an object."""
    strict: bool = False
    """True if arguments must fit the schema; an unsupported schema is then an error. False: any JSON object is accepted."""
    function: Callable[..., Any] | None = None
    """The Python function that `run` calls. None if the tool has only a schema."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _LONGEST_NAME:
            raise PromptError(f"tools: a tool's name must be a text of 1 to {_LONGEST_NAME} characters, not {self.name!r:.100}")
        if not isinstance(self.description, str):
            raise PromptError(f"tools: {self.name}: description must be a text, not {self.description!r:.100}")
        if not isinstance(self.strict, bool):
            raise PromptError(f"tools: {self.name}: strict must be true or false, not {self.strict!r:.100}")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Tool:
        """A tool from the dict of OpenAI's API, `{"type": "function", "function": {"name": ..., "parameters": {...}}}`, or from the inner
        dict alone. Raises `PromptError`."""
        kind = given.get("type", "function")
        if kind != "function":
            raise PromptError(f"tools: a tool's type must be 'function', not {kind!r:.100}")
        inner = given.get("function", given)
        if not isinstance(inner, Mapping):
            raise PromptError(f"tools: function must be a dict with a name, not {inner!r:.100}")
        if "name" not in inner:
            raise PromptError(f"tools: a tool must have a name: {dict(inner)!r:.100}")
        name, description, strict = inner["name"], inner.get("description"), inner.get("strict")
        return cls(
            name=name,
            description="" if description is None else description,
            parameters=_parameters(str(name), inner.get("parameters", inner.get("input_schema"))),
            strict=False if strict is None else strict,
        )

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """A tool from a Python function: its name, its docstring and the annotations of its parameters. Raises `PromptError` for an
        annotation without a JSON type."""
        from .function_schema import description_of, name_of, parameters_of  # only for tools from functions

        name = name_of(function)
        return cls(name, description_of(function), Schema(parameters_of(function)), function=function)

    def as_openai(self) -> dict[str, Any]:
        """The dict that chat templates take: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters.schema}
        return {"type": "function", "function": function}

    def run(self, arguments: str) -> str:
        """Call the function with the JSON text of its arguments. Returns the text of a tool message: a text unchanged, other results as
        JSON. Raises `ToolError` if the arguments do not fit or the function raises."""
        from .function_schema import called

        if self.function is None:
            raise ToolError(f"{self.name} has no Python function to run")
        return called(self.function, arguments)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Permission or duty of the model to call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    """"auto" lets the model decide, "required" forces at least one call, "none" offers no tool."""
    name: str | None = None
    """With "required": the only tool that may be called."""
    parallel: bool = True
    """True if an answer may have several calls."""


Tools = Mapping[str, Tool]
"""The offered tools by name, in order."""
OfferedTool = Union[Tool, Mapping[str, Any], Callable[..., Any]]
"""A tool that callers pass: a `Tool`, a dict as for `Tool.from_dict`, or a Python function."""


def offered(tools: Iterable[OfferedTool] | None) -> Tools:
    """Tools by name. Raises `PromptError` for an item that is not a tool, and for two tools of one name."""
    if tools is None:
        return {}
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise PromptError(f"tools must be a list of functions, dicts or Tools, not a {type(tools).__name__}")
    found: dict[str, Tool] = {}
    for number, given in enumerate(tools):
        tool = _tool(given, number)
        if tool.name in found:
            raise PromptError(f"tools[{number}]: there are two tools called {tool.name!r}: rename one")
        found[tool.name] = tool
    return found


def chosen(tool_choice: str | ToolChoice, tools: Tools, *, parallel: bool = True) -> ToolChoice:
    """The `ToolChoice` for "auto", "none", "required" or a tool's name. Without tools, "auto" means "none". Raises `PromptError`."""
    if isinstance(tool_choice, ToolChoice):
        choice = tool_choice
    elif not isinstance(tool_choice, str):
        raise PromptError(f'tool_choice must be "auto", "none", "required" or a tool\'s name, not {tool_choice!r:.100}')
    elif tool_choice in ("auto", "none", "required"):
        choice = ToolChoice(tool_choice, parallel=parallel)  # type: ignore[arg-type]
    else:
        choice = ToolChoice("required", tool_choice, parallel)
    if choice.name is not None and choice.name not in tools:
        names = f"the tools are {', '.join(tools)}" if tools else "there are no tools"
        raise PromptError(f"tool_choice: no tool is called {choice.name!r:.100}: {names}")
    if choice.mode == "required" and not tools:
        raise PromptError("tool_choice: a call is required, but there are no tools")
    return choice if tools else ToolChoice("none")


def _tool(given: OfferedTool, number: int) -> Tool:
    try:
        if isinstance(given, Tool):
            return given
        if isinstance(given, Mapping):
            return Tool.from_dict(given)
        if callable(given):
            return Tool.from_function(given)
    except PromptError as error:
        raise PromptError(f"tools[{number}]: {str(error).removeprefix('tools: ')}") from None
    raise PromptError(f"tools[{number}] must be a function, a dict or a Tool, not a {type(given).__name__}")


def _parameters(name: str, given: Any) -> Schema:
    if given is None:
        return Schema({"type": "object", "properties": {}})
    try:
        schema = Schema(given)
    except SamplingError as error:
        raise PromptError(f"tools: {name}: parameters: {str(error).removeprefix('structure: ')}") from None
    kind = schema.schema.get("type", "object") if isinstance(schema.schema, Mapping) else None
    if kind != "object":
        raise PromptError(f"tools: {name}: parameters must be the schema of an object, not of {kind!r:.100}")
    return schema
