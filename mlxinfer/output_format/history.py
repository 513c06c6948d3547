"""Converts conversations for a chat template, and renders the calls and tools that the template does not support."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ..errors import PromptError
from ..tools import Tools
from ..types import ToolCall
from .format import HERMES, CallFormat, OutputFormat
from .streaming_match import ID, KEY

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Keys under which clients and templates have the reasoning of an earlier answer."""

Message = Mapping[str, Any]

Call = tuple[str, Mapping[str, Any]]
"""A tool's name and the arguments."""


def messages_for_template(
    format: OutputFormat, messages: Sequence[Message], tools: Tools
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return (messages, tools) for `Tokenizer.encode_chat`; the second is None if the template does not list tools.

    `messages` follow OpenAI's API: `tool_calls` in answers, role "tool" for results, reasoning under any of `REASONING_NAMES`. Raises
    `PromptError` for malformed calls.
    """
    names: dict[str, str] = {}
    ready: list[dict[str, Any]] = []
    for message in messages:
        ready += _message(format, message, names, ready)
    if not tools:
        return ready, None
    if format.tools_in_template:
        return ready, [tool.as_openai() for tool in tools.values()]
    return _with_description(ready, describe(format.calls or HERMES, tools), format.system_in_template), None


def _message(format: OutputFormat, message: Message, names: dict[str, str], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replacement of a message; a result may be appended to the last message of `before` instead."""
    plain = dict(message)
    reasoning = next((plain[name] for name in REASONING_NAMES if isinstance(plain.get(name), str) and plain[name]), None)
    for name in REASONING_NAMES:
        plain.pop(name, None)
    if reasoning is not None:
        plain.update(dict.fromkeys(REASONING_NAMES, reasoning))
    if plain.get("role") == "tool":
        return _result(format, plain, names, before)
    calls = plain.get("tool_calls")
    if not calls:
        plain.pop("tool_calls", None)
        return [plain]
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, (Mapping, ToolCall)) for call in calls):
        raise PromptError('messages: tool_calls must be a list of calls, such as {"id": ..., "function": {"name": ..., "arguments": ...}}')
    calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} if isinstance(c, ToolCall) else c for c in calls]
    made = [_function(call) for call in calls]
    names.update({call["id"]: name for call, (name, _) in zip(calls, made, strict=True) if isinstance(call.get("id"), str)})
    if format.calls_in_template:
        plain["tool_calls"] = [_call(call, each, format) for call, each in zip(calls, made, strict=True)]
        plain["content"] = plain.get("content") or ""
        return [plain]
    del plain["tool_calls"]
    written, content = write_calls(format.calls or HERMES, made), plain.get("content")
    plain["content"] = _around("", content, "\n" + written) if content else written
    return [plain]


def _function(call: Message) -> Call:
    """Return name and arguments. Arguments that are not a JSON object, such as a truncated one, become the value of one."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if arguments is None:
        arguments = {}
    return str(function.get("name", "")), arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _call(call: Message, made: Call, format: OutputFormat) -> dict[str, Any]:
    name, arguments = made
    given = json.dumps(arguments, ensure_ascii=False) if format.arguments_as_text else dict(arguments)
    return {"id": _id(call.get("id"), format), "type": "function", "function": {"name": name, "arguments": given}}


def _id(given: Any, format: OutputFormat) -> str:
    """Return a call's id in the form that the chat template accepts; equal for a call and its result."""
    name = str(given or "call00000")
    if not format.short_ids or (len(name) == 9 and name.isascii() and name.isalnum()):
        return name
    return sha256(name.encode("utf-8", "replace")).hexdigest()[:9]


def _result(format: OutputFormat, plain: dict[str, Any], names: Mapping[str, str], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    name = plain.get("name") or names.get(str(plain.get("tool_call_id")))
    if format.results_in_template:
        given = {"tool_call_id": _id(plain["tool_call_id"], format)} if "tool_call_id" in plain else {}
        return [{**plain, **given, "content": _around("", plain.get("content")), **({"name": name} if name else {})}]
    content = _around("<tool_response>\n", plain.get("content"), "\n</tool_response>")
    if before and before[-1].get("role") == "user" and _text(before[-1].get("content")).endswith("</tool_response>"):
        before[-1]["content"] = _joined(_joined(before[-1]["content"], "\n"), content)
        return []
    return [{"role": "user", "content": content}]


def _around(before: str, content: Any, after: str = "") -> Any:
    """Return a message's content between two texts: as text, or as parts if some are not text."""
    return _joined(_joined(before, content if _has_images(content) else _text(content)), after)


def _has_images(content: Any) -> bool:
    return isinstance(content, (list, tuple)) and any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in content)


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one. Neighbouring texts become one part."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts: list[Any] = []
    for part in (*_parts(first), *_parts(second)):
        if parts and "text" in part and "text" in parts[-1]:
            parts[-1] = {**part, "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    return [part for part in parts if part.get("text") != ""]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text(content: Any) -> str:
    """Return a message's content as text; for a list of parts, their texts joined."""
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return "" if content is None else content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _with_description(messages: list[dict[str, Any]], description: str, system: bool) -> list[dict[str, Any]]:
    """Add the description to the system message, as a new system message, or before the first user message."""
    for index, message in enumerate(messages):
        if message.get("role") in ("system", "developer") if system else message.get("role") == "user":
            content = message.get("content")
            joined = _around("", content, f"\n\n{description}") if system and content else _around(f"{description}\n\n", content)
            joined = joined if (system and content) or not isinstance(joined, str) else joined.rstrip()
            return [*messages[:index], {**message, "content": joined}, *messages[index + 1 :]]
    return [{"role": "system" if system else "user", "content": description}, *messages]


def write_calls(calls: CallFormat, made: Sequence[Call]) -> str:
    """Return the text of these calls. The reader returns the same calls unless a value contains the format's literals."""
    texts = [_call_text(calls, index, name, arguments) for index, (name, arguments) in enumerate(made)]
    return calls.section_begin + calls.separator.join(texts) + calls.section_end


def _call_text(calls: CallFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    if calls.kind == "object":
        inner = _json({calls.name_key: name, calls.arguments_key: arguments})
        return f"{calls.call_begin.replace(ID, str(index))}{inner}{calls.call_end.replace(ID, str(index))}"
    begin, name_end = calls.call_begin.replace(ID, str(index)), calls.name_end.replace(ID, str(index))
    return f"{begin}{name}{name_end}{_arguments_text(calls, arguments)}{calls.call_end.replace(ID, str(index))}"


def _arguments_text(calls: CallFormat, arguments: Mapping[str, Any]) -> str:
    if calls.kind == "tagged":
        return "".join(_tagged_argument(calls, key, value) for key, value in arguments.items())
    if calls.kind == "gemma":
        return _gemma_value(arguments, calls.quote)
    if calls.kind == "pythonic":
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return _json(arguments)


def _tagged_argument(calls: CallFormat, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    kind = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}.get(type(value), "null")
    key_end = calls.key_end if is_text or not calls.key_end_json else calls.key_end_json.replace(ID, kind)
    begin = f"{calls.key_begin}{key}{key_end}".replace(KEY, key)
    return f"{begin}{value if is_text else _json(value)}{calls.value_end.replace(KEY, key)}"


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma_value(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_gemma_value(item, quote) for item in value) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def describe(calls: CallFormat, tools: Tools) -> str:
    """Return a description of the tools and of the call format, for chat templates that do not list tools."""
    listed = "\n".join(_json(tool.as_openai()) for tool in tools.values())
    form = write_calls(calls, [("<function-name>", {"<argument-name>": "<argument-value>"})])
    several = "Write one such block for each call." if calls.parallel else "Call one function at a time."
    return (
        "# Tools\n\nYou may call one or more functions to help with the user's request.\n\n"
        f"These are the functions, as JSON schemas:\n<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, answer in this form, with nothing after it:\n{form}\n\n{several}"
    )
