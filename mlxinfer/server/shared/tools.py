"""Tools and their calls, as all dialects share them: what a request offers, and what a conversation tells of earlier calls."""

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
from ..errors import APIError, invalid, of_error
from ..validation import FIRST_ERROR_ONLY

MAX_TOOLS = 1024
Name = Annotated[str, Field(min_length=1, max_length=256)]
"""What a tool is called by."""
CallId = Annotated[str, Field(min_length=1, max_length=256)]
"""What a call is referred to by."""
SchemaObject = dict[str, Any]
"""JSON Schema of a tool's arguments."""


def tools_field(kind: Any) -> Any:
    """The type of a list of tools."""
    return Annotated[list[kind], FIRST_ERROR_ONLY, Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request."""

    tools: tuple[Tool, ...] = ()
    """In the order of the request."""
    choice: ToolChoice = field(default_factory=ToolChoice)
    """Whether they may, must or must not be called."""


NO_TOOLS = Offer()


def tool_from(where: str, name: str, description: str | None, parameters: SchemaObject | None, strict: bool | None) -> Tool:
    """A tool of a request, whose field is `where`. Raises `APIError`."""
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
    """What a request offers: the tools of its field `given_as`, of which only those in `chosen`, if the choice, its field `by`, says so.
    Raises `APIError` for two tools of one name, and for a choice of none that is there."""
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
        raise invalid(f"{by}: a call is asked for, and there is no tool to call", by, "invalid_value")
    return Offer(kept, choice)


def schema_refused(error: PromptError, names: Iterable[str]) -> APIError:
    """The response to a strict tool whose schema cannot be held, which is told by its place among the offered ones."""
    message = str(error)
    for number, name in enumerate(names):
        if message.startswith(f"tools: {name}: "):
            where = f"tools[{number}]"
            return invalid(f"{where}: {message.removeprefix('tools: ')}", where, "invalid_value")
    return of_error(error)


class EarlierCalls:
    """The calls of a conversation so far, by their ids."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._open: list[str] = []

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
        """A call as chat templates take it. Arguments that are no JSON stay the text that they are."""
        self._names[call_id] = name
        self._open.append(call_id)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def unanswered(self, name: str | None = None) -> str | None:
        """The id of the first call of this tool, or of any, that has no result yet, for dialects whose results have no ids."""
        return next((one for one in self._open if name in (None, self._names[one])), None)

    def result(self, call_id: str, content: str, where: str) -> dict[str, Any]:
        """What a tool answered, as chat templates take it. `where` is the field with the id. Raises `APIError` if no such call was made."""
        name = self._names.get(call_id)
        if name is None:
            raise invalid(f"{where}: {call_id[:100]!r} is the id of no earlier call in this conversation", where, "invalid_value")
        if call_id in self._open:
            self._open.remove(call_id)
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def as_object(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None for what is none, as of a call that broke off."""
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # no infinities, no halves of characters
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def as_text(name: str, arguments: str) -> str:
    """A call that broke off, for dialects whose arguments are objects: all that was written of it is delivered."""
    return f"{name}({arguments}"


def merge_pieces(pieces: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Pieces that came together with those of the same call in one, and without those that say nothing."""
    found: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        before = found.get(piece.index)
        if before is not None:
            piece = ToolCallDelta(piece.index, before.arguments + piece.arguments, before.id or piece.id, before.name or piece.name)
        found[piece.index] = piece
    return [piece for piece in found.values() if piece.name is not None or piece.arguments]


def as_pieces(calls: Iterable[ToolCall]) -> tuple[ToolCallDelta, ...]:
    """Whole calls as the pieces of a stream, for dialects that make both from the same events."""
    return tuple(ToolCallDelta(index, call.arguments, call.id, call.name) for index, call in enumerate(calls))


class GatheredCalls:
    """Puts streamed calls together. A call is complete when the next one begins, or the answer ends."""

    def __init__(self) -> None:
        self._open: dict[int, ToolCall] = {}

    def add(self, pieces: Iterable[ToolCallDelta]) -> list[ToolCall]:
        """The calls that were completed by these pieces."""
        for piece in pieces:
            before = self._open.get(piece.index) or ToolCall(piece.id or "", piece.name or "", "")
            self._open[piece.index] = ToolCall(before.id, before.name, before.arguments + piece.arguments)
        newest = max(self._open, default=0)
        return [self._open.pop(index) for index in sorted(self._open) if index < newest]

    def end(self) -> list[ToolCall]:
        """The calls that were still open when the answer ended."""
        found = [self._open[index] for index in sorted(self._open)]
        self._open.clear()
        return found
