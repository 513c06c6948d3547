"""Tools and tool calls, shared by all dialects."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from ...errors import PromptError, SamplingError
from ...structure import Schema
from ...tools import Tool, ToolChoice
from ...types import ToolCall, ToolCallDelta
from ..errors import APIError, from_engine_error, invalid
from ..validation import FIRST_ERROR_ONLY
from .images import Content

MAX_TOOLS = 1024
Name = Annotated[str, Field(min_length=1, max_length=256)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
SchemaObject = dict[str, Any]


def tools_field(kind: Any) -> Any:
    """The type of a list of tools."""
    return Annotated[list[kind], FIRST_ERROR_ONLY, Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    """Allows, requires or forbids calls."""


NO_TOOLS = Offer()


def tool_from(where: str, name: str, description: str | None, parameters: SchemaObject | None, strict: bool | None) -> Tool:
    """A tool from the request's field `where`. Raises `APIError`."""
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(f"{where}: the schema of a tool's arguments must be of type object", where, "invalid_value")
    try:
        schema = Schema(parameters or {"type": "object", "properties": {}})
        return Tool(name, description or "", schema, strict=bool(strict))
    except SamplingError as error:
        raise invalid(f"{where}: {str(error).removeprefix('structure: ')}", where, "invalid_value") from None
    except PromptError as error:
        raise invalid(f"{where}: {str(error).removeprefix('tools: ')}", where, "invalid_value") from None


def make_offer(
    given_as: str, tools: Sequence[Tool], choice: ToolChoice, *, chosen: Collection[str] | None = None, by: str = "tool_choice"
) -> Offer:
    """The tools of the request's field `given_as`. `chosen` are the names that the choice allows; None allows all. The choice is the
    request's field `by`. Raises `APIError` for two tools with the same name, and for a choice that names an unknown tool."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.name in names:
            raise invalid(f"{given_as}[{number}]: another tool is called {tool.name[:100]!r} too", f"{given_as}[{number}]", "invalid_value")
        names.add(tool.name)
    for name in [*(chosen or ()), *filter(None, (choice.name,))]:
        if name not in names:
            raise invalid(f"{by}: {name[:100]!r} is none of {given_as}", by, "invalid_value")
    kept = tuple(tool for tool in tools if chosen is None or tool.name in chosen)
    if choice.mode == "required" and not kept:
        raise invalid(f"{by}: a call is required, but the request has no tools", by, "invalid_value")
    return Offer(kept, choice)


def schema_refused(error: PromptError, names: Iterable[str]) -> APIError:
    """The error response to a strict tool whose schema is not supported. The message names the tool by its index."""
    message = str(error)
    for number, name in enumerate(names):
        if message.startswith(f"tools: {name}: "):
            where = f"tools[{number}]"
            return invalid(f"{where}: {message.removeprefix('tools: ')}", where, "invalid_value")
    return from_engine_error(error)


class EarlierCalls:
    """Calls in the conversation so far, by id."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._open: list[str] = []

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """A call in the form of chat templates. Arguments that are not JSON stay text."""
        self._names[call_id] = name
        self._open.append(call_id)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def unanswered(self, name: str | None = None) -> str | None:
        """The id of the first call without a result, of the tool `name` or of any tool. For dialects whose results have no ids."""
        return next((one for one in self._open if name in (None, self._names[one])), None)

    def result(self, call_id: str, content: Content, where: str) -> dict[str, Any]:
        """A tool's result in the form of chat templates. `where` is the field with the id. Raises `APIError` if no such call was made."""
        name = self._names.get(call_id)
        if name is None:
            raise invalid(f"{where}: {call_id[:100]!r} is not the id of an earlier call in this conversation", where, "invalid_value")
        if call_id in self._open:
            self._open.remove(call_id)
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def as_object(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None if they are not a JSON object, for example of a call that broke off."""
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # no infinities, no lone surrogates
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def as_text(name: str, arguments: str) -> str:
    """The text of a call that broke off, for dialects whose arguments are objects: all of its text is delivered."""
    return f"{name}({arguments}"


def merge_pieces(pieces: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Merge the pieces of each call, and drop empty pieces."""
    found: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        before = found.get(piece.index)
        if before is not None:
            piece = ToolCallDelta(piece.index, before.arguments + piece.arguments, before.id or piece.id, before.name or piece.name)
        found[piece.index] = piece
    return [piece for piece in found.values() if piece.name is not None or piece.arguments]


def as_pieces(calls: Iterable[ToolCall]) -> tuple[ToolCallDelta, ...]:
    """Complete calls as pieces of a stream, for dialects that render both from the same events."""
    return tuple(ToolCallDelta(index, call.arguments, call.id, call.name) for index, call in enumerate(calls))


class GatheredCalls:
    """Assembles streamed calls. A call is complete when the next call starts or the answer ends."""

    def __init__(self) -> None:
        self._open: dict[int, ToolCall] = {}

    def add(self, pieces: Iterable[ToolCallDelta]) -> list[ToolCall]:
        """Calls that these pieces have completed."""
        for piece in pieces:
            before = self._open.get(piece.index) or ToolCall(piece.id or "", piece.name or "", "")
            self._open[piece.index] = ToolCall(before.id, before.name, before.arguments + piece.arguments)
        newest = max(self._open, default=0)
        return [self._open.pop(index) for index in sorted(self._open) if index < newest]

    def end(self) -> list[ToolCall]:
        """Calls that were incomplete when the answer ended."""
        found = [self._open[index] for index in sorted(self._open)]
        self._open.clear()
        return found
