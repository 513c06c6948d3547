"""Conversations as a chat template takes them: calls, results and reasoning in the form that it knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ..errors import PromptError
from ..tools import Tools
from ..types import ToolCall
from .format import HERMES, OutputFormat
from .render_calls import Call, describe, write_calls

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What clients, and templates, call the reasoning of an earlier answer."""

Message = Mapping[str, Any]


def messages_for_template(
    format: OutputFormat, messages: Sequence[Message], tools: Tools
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools) for `Tokenizer.encode_chat`. `messages` are as OpenAI's API has them: `tool_calls` in answers, role "tool" for
    results, reasoning under any of `REASONING_NAMES`. Without tools the second is None."""
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
    """What takes a message's place; a result may join the message before it instead."""
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
    content = _text(plain.get("content"))
    plain["content"] = (content + "\n" if content else "") + write_calls(format.calls or HERMES, made)
    return [plain]


def _function(call: Message) -> Call:
    """Name and arguments; arguments that are no JSON object, as a model may have broken off in them, become the value of one."""
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
    """A call's id as the chat template takes it; the same for a call and its result."""
    name = str(given or "call00000")
    if not format.short_ids or (len(name) == 9 and name.isascii() and name.isalnum()):
        return name
    return sha256(name.encode("utf-8", "replace")).hexdigest()[:9]


def _result(format: OutputFormat, plain: dict[str, Any], names: Mapping[str, str], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    name = plain.get("name") or names.get(str(plain.get("tool_call_id")))
    if format.results_in_template:
        given = {"tool_call_id": _id(plain["tool_call_id"], format)} if "tool_call_id" in plain else {}
        return [{**plain, **given, "content": _text(plain.get("content")), **({"name": name} if name else {})}]
    content = f"<tool_response>\n{_text(plain.get('content'))}\n</tool_response>"
    if before and before[-1].get("role") == "user" and str(before[-1].get("content", "")).endswith("</tool_response>"):
        before[-1]["content"] += "\n" + content
        return []
    return [{"role": "user", "content": content}]


def _text(content: Any) -> str:
    """A message's content as text; of a list of parts, the texts."""
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return "" if content is None else content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _with_description(messages: list[dict[str, Any]], description: str, system: bool) -> list[dict[str, Any]]:
    """The description in front: at the end of the system message, in one of its own, or before the first user message."""
    for index, message in enumerate(messages):
        if message.get("role") in ("system", "developer") if system else message.get("role") == "user":
            content = _text(message.get("content"))
            joined = f"{content}\n\n{description}" if system and content else f"{description}\n\n{content}".rstrip()
            return [*messages[:index], {**message, "content": joined}, *messages[index + 1 :]]
    return [{"role": "system" if system else "user", "content": description}, *messages]
