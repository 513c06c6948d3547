"""Reads off from a chat template how calls are written, by rendering calls with marked names and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import MLXInferError
from ..tokenizer.tokenizer import Tokenizer
from .format import CallFormat

_USER, _NAME, _KEY, _VALUE, _RESULT = "userQuux", "fnAlpha", "keyBeta", "valGamma", "resultDelta"


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": "x"}}, "required": [_KEY]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


def _rendered(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
    """What the template renders, or nothing if it refuses."""
    try:
        return tokenizer.render_chat(messages, **variables)
    except MLXInferError:
        return ""


def knows(tokenizer: Tokenizer) -> dict[str, bool]:
    """What the chat template renders of tools, calls, results and system messages, as fields of `OutputFormat`."""
    user = {"role": "user", "content": _USER}
    answer = {"role": "assistant", "content": "", "tool_calls": [_call(_NAME, {_KEY: _VALUE})]}
    result = {"role": "tool", "name": _NAME, "tool_call_id": "call00001", "content": _RESULT}
    tools = [_tool(_NAME)]
    calls = _rendered(tokenizer, [user, answer], tools=tools, add_generation_prompt=False)
    return {
        "tools_in_template": _KEY in _rendered(tokenizer, [user], tools=tools),
        "calls_in_template": _NAME in calls.rpartition(_USER)[2],
        "results_in_template": _RESULT in _rendered(tokenizer, [user, answer, result, user], tools=tools),
        "system_in_template": _VALUE in _rendered(tokenizer, [{"role": "system", "content": _VALUE}, user]),
    }


def calls_of_template(tokenizer: Tokenizer) -> CallFormat | None:
    """How earlier calls are written; None if they are not, or cannot be read back."""
    user = {"role": "user", "content": _USER}
    answer = {"role": "assistant", "content": "", "tool_calls": [_call(_NAME, {_KEY: _VALUE})]}
    text = _rendered(tokenizer, [user, answer], tools=[_tool(_NAME)], add_generation_prompt=False).rpartition(_USER)[2]
    start = text.find('{"name": ')
    if start < 0 or "<tool_call>" not in text:
        return None
    try:
        json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return CallFormat("object", call_begin="<tool_call>\n", call_end="\n</tool_call>", separator="\n")
