"""Tools in OpenAI's APIs: the tools of a request, and the calls of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Tag
from typing_extensions import NotRequired, TypedDict

from ...tools import Tool, ToolChoice
from ...types import ToolCall, ToolCallDelta
from ..errors import invalid
from ..shared.tools import Name, Offer, SchemaObject, make_offer, merge_pieces, tool_from, tools_field
from ..validation import FIRST_ERROR_ONLY, Ignored, OneOf, StrictModel

_MODES = Literal["none", "auto", "required"]


class Function(StrictModel):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments. With `strict`, the schema constrains the
    arguments, and an unsupported schema is refused."""

    name: Name
    description: str | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None

    def tool(self, where: str) -> Tool:
        """The tool. Raises `APIError`."""
        return tool_from(where, self.name, self.description, self.parameters, self.strict)


class FunctionTool(StrictModel):
    type: Annotated[str, OneOf("function")] = "function"
    function: Function
    cache_control: Annotated[Any, Ignored("all prompts are cached", within="tools[]")] = None


class FunctionName(StrictModel):
    name: Name


class ChosenFunction(StrictModel):
    type: Annotated[str, OneOf("function")] = "function"
    function: FunctionName


class AllowedTools(StrictModel):
    """Tools of a request that may or must be called now."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], FIRST_ERROR_ONLY]


class AllowedChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: Any) -> str:
    """The tag of a union of a mode, one tool, and several allowed tools."""
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<one>"


_Choice = Annotated[
    Union[
        Annotated[_MODES, Tag("<mode>")],
        Annotated[ChosenFunction, Tag("<one>")],
        Annotated[AllowedChoice, Tag("<allowed>")],
    ],
    Discriminator(kind_of_choice),
]


def _mode_or_name(value: Any) -> str:
    return "<mode>" if isinstance(value, str) else "<one>"


_FunctionChoice = Annotated[
    Union[Annotated[Literal["none", "auto"], Tag("<mode>")], Annotated[FunctionName, Tag("<one>")]], Discriminator(_mode_or_name)
]


class ToolFields(StrictModel):
    """The tools of a request. `functions` and `function_call` are the older names of `tools` and `tool_choice`; with them the answer has
    the older form too."""

    tools: tools_field(FunctionTool) | None = None  # type: ignore[valid-type]
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: tools_field(Function) | None = None  # type: ignore[valid-type]
    function_call: _FunctionChoice | None = None

    def offer(self) -> Offer:
        """The tools of the request. Raises `APIError`."""
        if self.functions:
            return self._offer_of_functions()
        tools = [tool.function.tool(f"tools[{number}].function") for number, tool in enumerate(self.tools or ())]
        chosen = self.tool_choice
        if isinstance(chosen, AllowedChoice):
            names = {one.function.name for one in chosen.allowed_tools.tools}
            return make_offer("tools", tools, choice_of(chosen.allowed_tools.mode, None, self.parallel_tool_calls), chosen=names)
        if isinstance(chosen, ChosenFunction):
            return make_offer("tools", tools, choice_of("required", chosen.function.name, self.parallel_tool_calls))
        return make_offer("tools", tools, choice_of(chosen or "auto", None, self.parallel_tool_calls))

    def _offer_of_functions(self) -> Offer:
        if self.tools:
            raise invalid("functions: this is the older name of tools, give only one of them", "functions", "invalid_value")
        tools = [function.tool(f"functions[{number}]") for number, function in enumerate(self.functions or ())]
        chosen = self.function_call
        if isinstance(chosen, FunctionName):
            return make_offer("functions", tools, choice_of("required", chosen.name, False), by="function_call")
        return make_offer("functions", tools, choice_of(chosen or "auto", None, False), by="function_call")

    @property
    def has_older_form(self) -> bool:
        """True if the answer has `function_call` instead of `tool_calls`."""
        return bool(self.functions)


def choice_of(mode: Literal["auto", "none", "required"], name: str | None, parallel: bool | None) -> ToolChoice:
    """A choice. A tool that the request names is called once, unless the request allows several calls."""
    return ToolChoice(mode, name, parallel=name is None if parallel is None else parallel)


class FunctionCallPiece(TypedDict):
    name: NotRequired[str]
    arguments: str


class AnswerToolCall(TypedDict):
    """A call, or in a stream a piece of a call. `index` is only in streams. In a stream, only the first piece of a call has `id`, `type`
    and the name."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallPiece


class CallFields(TypedDict):
    """The fields of a message with calls."""

    tool_calls: NotRequired[list[AnswerToolCall]]
    function_call: NotRequired[FunctionCallPiece]


def whole_calls(calls: Sequence[ToolCall], older_form: bool) -> CallFields:
    """The calls of a complete answer."""
    functions = [FunctionCallPiece(name=call.name, arguments=call.arguments) for call in calls]
    if not calls or older_form:
        return CallFields(function_call=functions[0]) if calls else CallFields()
    return CallFields(
        tool_calls=[AnswerToolCall(id=call.id, type="function", function=one) for call, one in zip(calls, functions, strict=True)]
    )


def delta_calls(pieces: Iterable[ToolCallDelta], older_form: bool) -> CallFields:
    """The pieces of calls in one event."""
    found = [_call_piece(piece) for piece in merge_pieces(pieces)]
    if not found or older_form:
        return CallFields(function_call=found[0]["function"]) if found else CallFields()
    return CallFields(tool_calls=found)


def _call_piece(piece: ToolCallDelta) -> AnswerToolCall:
    if piece.name is None:
        return AnswerToolCall(index=piece.index, function=FunctionCallPiece(arguments=piece.arguments))
    function = FunctionCallPiece(name=piece.name, arguments=piece.arguments)
    return AnswerToolCall(index=piece.index, id=piece.id or "", type="function", function=function)


def finish_reason(reason: str, called: bool = False, older_form: bool = False) -> str:
    """The finish reason. An answer that was cut off keeps its reason even if it has calls; a loop is one of "length"."""
    if reason == "loop":
        return "length"
    if reason != "stop" or not called:
        return reason
    return "function_call" if older_form else "tool_calls"
