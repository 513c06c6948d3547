"""Formats that checkpoints declare, as transformers reads them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from templates import SHAPES

from mlxinfer.output_format.detect import derived
from mlxinfer.output_format.format import OutputFormat
from mlxinfer.output_format.history import write_calls
from mlxinfer.output_format.response_template import read_response_template
from tests.support.schemas.tool_chats import TOOLS, TemplateOnly, calls_in, check_every_cut, random_calls, read

THINK = {"open": "<think>", "close": "</think>", "content": "text"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "object": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
    "tagged": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": NAMED,
        },
    },
    "gemma": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
    },
    "json": {
        "tool_calls": {"open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", "repeats": True, "content": "json", "transform": NAMED}
    },
    "list": {
        "tool_calls": {
            "open": "<TOOLCALL>",
            "close": "</TOOLCALL>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{input}"}},
        },
    },
}


def _template(name: str) -> dict[str, Any]:
    fields = {**TEMPLATES[name], "content": {}}
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


@pytest.mark.parametrize("name", TEMPLATES)
def test_declared_formats_are_read(name: str) -> None:
    format = read_response_template(_template(name))
    assert format is not None
    assert format.calls is not None
    assert format.calls.kind == ("object" if name == "list" else name)
    assert (format.reasoning is not None) == (name in ("object", "tagged", "gemma"))
    rng = random.Random(name)
    for number in range(10):
        calls = random_calls(rng)
        text = write_calls(format.calls, calls)
        assert calls_in(read(format, text)) == calls
        if number < 1:
            check_every_cut(format, text, "", rng, 20)


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"fields": []},
        {"fields": {"tool_calls": 3, "thinking": None}},
        {"fields": {"tool_calls": {"open_pattern": r"<(a|b)(?P<name>\w+)>", "content": "json"}}},
        {"fields": {"tool_calls": {"open": "", "content": "json"}}},
        {"fields": {"tool_calls": {"open": "<x>", "content": "kv-lines"}}},
        {"fields": {"thinking": {"open": "", "close": ""}}},
    ],
)
def test_what_is_not_understood_is_not_used(template: dict[str, Any]) -> None:
    assert read_response_template(template) is None
    templates = TemplateOnly(SHAPES["qwen3"].template)
    assert derived(templates, response_template=template).source == "chat template"


def test_what_a_checkpoint_declares_comes_before_its_chat_template() -> None:
    templates = TemplateOnly(SHAPES["qwen3"].template)
    declared = derived(templates, response_template=_template("tagged"))
    assert (declared.source, declared.calls.kind if declared.calls else "") == ("response_template", "tagged")
    chosen = derived(templates, "mistral", _template("tagged"))
    assert (chosen.source, chosen.calls.kind if chosen.calls else "") == ("option", "json")


@pytest.mark.long
@pytest.mark.parametrize("name", ["object", "tagged", "gemma"])
def test_transformers_reads_the_same(name: str) -> None:
    parser_class = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers has no ResponseParser").ResponseParser

    template = _template(name)
    format = read_response_template(template)
    assert format is not None
    assert format.calls is not None
    rng, tools = random.Random(name), [tool.as_openai() for tool in TOOLS.values()]
    for number in range(60):
        calls = [call for call in random_calls(rng) if call[0] in ("get", "get_weather")]
        if name != "object":  # transformers takes values without quotes apart in another way where they begin or end with whitespace
            calls = [(tool, {key: value for key, value in made.items() if key in ("count", "flag", "ratio")}) for tool, made in calls]
            calls = [(tool, {"city": "a <b> 'c'", **made}) for tool, made in calls]
        text = f"Well.\n\n{write_calls(format.calls, calls)}" if calls else "Well. <tool"
        if format.reasoning and number % 2:
            text = f"{format.reasoning.begin}\nhm\n{format.reasoning.end}\n\n{text}"
        parser = parser_class(template, prefix="<|im_start|>assistant\n", tools=tools)
        parser.feed(text)
        message, _ = parser.finalize()
        assert _as_message(format, read(format, text)) == (
            [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])],
            message.get("reasoning_content") or message.get("thinking") or "",
            message.get("content", "").strip(),
        )


def _as_message(format: OutputFormat, events: list[tuple[str, str]]) -> tuple[Any, str, str]:
    texts = {kind: "".join(text for found, text in events if found == kind) for kind in ("reasoning", "content")}
    return calls_in(events), texts["reasoning"], texts["content"].strip()
