"""Messages as this API sends them, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ..fields import FIRST_ERROR_ONLY, Body, Only, TextOrParts, plain_text
from ..problems import Problem, invalid, unsupported

MAX_MESSAGES = 4096


class Message(Body):
    """`developer` is what newer clients call `system`. Reasoning goes to the template, which keeps or drops it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[Any, Only()] = None
    tool_calls: Annotated[Any, Only([])] = None
    tool_call_id: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    content: TextOrParts | None = None


Messages = Annotated[list[Message], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises `Problem`."""
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise unsupported(f"{where}.role", f"{where}.role: tools are not supported yet")
    if message.content is None:
        raise invalid(f"{where}.content: a text is needed", f"{where}.content", "invalid_value")
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": plain_text(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = _reasoning(message, where)
    return plain if reasoning is None else {**plain, "reasoning_content": reasoning}


def _reasoning(message: Message, where: str) -> str | None:
    given = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if given is not None and message.role != "assistant":
        raise Problem(400, "invalid", f"{where}: only an assistant's message has reasoning", param=where, code="invalid_value")
    return given
