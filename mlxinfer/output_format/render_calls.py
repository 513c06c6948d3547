"""Writes calls, and descriptions of tools, as a model of a format would read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..tools import Tools
from .format import CallFormat
from .streaming_match import ID, KEY

Call = tuple[str, Mapping[str, Any]]
"""A tool's name, and the arguments."""


def write_calls(calls: CallFormat, made: Sequence[Call]) -> str:
    """The text of these calls. The reader gives the same calls back, unless a value has the format's own literals in it."""
    texts = [_call(calls, index, name, arguments) for index, (name, arguments) in enumerate(made)]
    return calls.section_begin + calls.separator.join(texts) + calls.section_end


def _call(calls: CallFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    if calls.kind == "object":
        inner = _json({calls.name_key: name, calls.arguments_key: arguments})
        return f"{calls.call_begin.replace(ID, str(index))}{inner}{calls.call_end.replace(ID, str(index))}"
    begin, name_end = calls.call_begin.replace(ID, str(index)), calls.name_end.replace(ID, str(index))
    return f"{begin}{name}{name_end}{_arguments(calls, arguments)}{calls.call_end.replace(ID, str(index))}"


def _arguments(calls: CallFormat, arguments: Mapping[str, Any]) -> str:
    if calls.kind == "tagged":
        return "".join(_tagged(calls, key, value) for key, value in arguments.items())
    if calls.kind == "gemma":
        return _gemma(arguments, calls.quote)
    if calls.kind == "pythonic":
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return _json(arguments)


def _tagged(calls: CallFormat, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    kind = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}.get(type(value), "null")
    key_end = calls.key_end if is_text or not calls.key_end_json else calls.key_end_json.replace(ID, kind)
    begin = f"{calls.key_begin}{key}{key_end}".replace(KEY, key)
    return f"{begin}{value if is_text else _json(value)}{calls.value_end.replace(KEY, key)}"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def describe(calls: CallFormat, tools: Tools) -> str:
    """What tells a model of the tools, and how to call them, where its chat template does not."""
    listed = "\n".join(_json(tool.as_openai()) for tool in tools.values())
    form = write_calls(calls, [("<function-name>", {"<argument-name>": "<argument-value>"})])
    several = "Write one such block for each call." if calls.parallel else "Call one function at a time."
    return (
        "# Tools\n\nYou may call one or more functions to help with the user's request.\n\n"
        f"These are the functions, as JSON schemas:\n<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, answer in this form, with nothing after it:\n{form}\n\n{several}"
    )
