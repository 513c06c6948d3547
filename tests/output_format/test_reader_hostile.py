"""Hostile templates, schemas and texts must do no harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxinfer.errors import PromptError
from mlxinfer.output_format import OutputFormat, messages_for_template
from mlxinfer.output_format.format import HERMES
from mlxinfer.output_format.from_template import KEYS, NAMES, NUMBER, TEXT, _tagged
from mlxinfer.output_format.history import write_calls
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.response_template import _named
from mlxinfer.output_format.schema_types import types_of
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.structured_output.grammar_rules import GrammarRules
from mlxinfer.structured_output.value_grammar import ArgumentRules
from mlxinfer.types import ToolCall
from tests.support.schemas.tool_chats import TOOLS

OUTPUT = OutputFormat(None, HERMES, "described")


def nested(width: int, depth: int) -> dict[str, Any]:
    """References that would be a tree of `width ** depth` schemas, were each followed anew."""
    named = {
        f"N{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/N{i + 1}"} for j in range(width)}} for i in range(depth)
    }
    named[f"N{depth}"] = {"type": "string"}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/N0"}}, "$defs": named}


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_references_are_followed_once(name):
    rules = GrammarRules({})
    calls = FAMILIES[name].calls
    assert calls is not None
    ArgumentRules(rules, calls, nested(10, 10), exact=False).arguments()


def test_types_of_references_to_themselves():
    root = {"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"anyOf": [{"$ref": "#/$defs/N"}] * 300}}}
    assert types_of(root, "a") is None
    assert types_of({"properties": {"a": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"type": "string"}}}, "a") == frozenset({"string"})


def test_what_looks_like_a_placeholder_in_an_argument_stays():
    assert json.loads(write_calls(HERMES, [("get", {"path": "/users/{id}"})]).split("\n")[1])["arguments"] == {"path": "/users/{id}"}
    tagged = FAMILIES["qwen3-coder"].calls
    assert tagged is not None
    assert "f'{key}'" in write_calls(tagged, [("run", {"code": "f'{key}'"})])


def test_whitespace_alone_marks_no_value():
    """A reader could not find it."""
    for text in (f" {KEYS[0]}: {TEXT}\n {KEYS[1]}: {NUMBER}\n", f"<{KEYS[0]} {TEXT}><{KEYS[1]} {NUMBER}>"):
        assert _tagged(NAMES[0] + text, NAMES[0], 0) is None
    assert _tagged(f"{NAMES[0]}<{KEYS[0]}={TEXT}><{KEYS[1]}={NUMBER}>", NAMES[0], 0) is not None


def test_an_empty_quote_is_none():
    assert _named(HERMES, "json", {"string_delims": [["", ""]]}) is None


def test_the_end_of_a_call_is_no_content():
    """A call literal before a name that is not an offered tool."""
    reader = OutputReader(OUTPUT, TOOLS)
    text = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'
    events = [*reader.add(text), *reader.finish()]
    assert [event.kind for event in events][:1] == ["call_begin"]
    content = "".join(event.text for event in events if event.kind == "content")
    assert content.strip().startswith("<tool_call>")


def test_whitespace_without_end_is_not_held_back():
    reader = OutputReader(OUTPUT, TOOLS)
    delivered = sum(len(event.text) for _ in range(100) for event in reader.add(" " * 64))
    assert delivered >= 6400 - 256


def test_calls_in_messages():
    call = ToolCall("call_1", "get", '{"city": "Rome"}')
    as_dict = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    rendered = [
        messages_for_template(OUTPUT, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [each]}], TOOLS)
        for each in (call, as_dict)
    ]
    assert rendered[0] == rendered[1]
    with pytest.raises(PromptError, match="must be a list of calls"):
        messages_for_template(OUTPUT, [{"role": "assistant", "content": "", "tool_calls": ["x"]}], TOOLS)
