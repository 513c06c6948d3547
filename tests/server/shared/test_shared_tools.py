"""Unusual tools, arguments and conversations, in the form that the engine gets."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mlxinfer.errors import TemplateError
from mlxinfer.server.errors import APIError
from mlxinfer.server.serving import encode_chat
from mlxinfer.server.shared.tools import as_object, tool_from


@pytest.mark.parametrize("kind", ["string", ["string", "null"], None, 5])
def test_arguments_are_objects(kind: Any) -> None:
    with pytest.raises(APIError, match=r"tools\[0\]: the schema of a tool's arguments must be of type object"):
        tool_from("tools[0]", "f", None, {"type": kind}, strict=False)
    assert tool_from("tools[0]", "f", None, {"type": ["object", "null"]}, strict=False).name == "f"


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": NaN}', "[1]", '{"a"'])
def test_what_json_cannot_carry_on_is_no_object(arguments: str) -> None:
    assert as_object(arguments) is None


def test_neighbours_are_joined_where_the_template_wants_one() -> None:
    """Coding agents send several consecutive system messages, and several user messages."""
    seen = []

    async def chat_prompt(messages: list[dict[str, Any]], **_: Any) -> str:
        seen.append(messages)
        roles = [message["role"] for message in messages]
        if any(a == b for a, b in pairwise(roles)):
            raise TemplateError("roles must alternate")
        return "prompt"

    context: Any = None  # only images need one
    served: Any = SimpleNamespace(llm=SimpleNamespace(chat_prompt=chat_prompt))
    said = [{"role": role, "content": text} for role, text in [("system", "A"), ("system", "B"), ("user", "C"), ("user", "D")]]
    assert asyncio.run(encode_chat(context, served, said)) == "prompt"
    assert seen == [said, [{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "C\n\nD"}]]
    answers = [{"role": "user", "content": "C"}, {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(APIError, match="alternate"):
        asyncio.run(encode_chat(context, served, answers))
