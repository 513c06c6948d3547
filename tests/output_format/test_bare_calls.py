"""Calls that a model writes as plain JSON, bare or in a code block, beside its own form."""

from __future__ import annotations

import json
import random

import pytest

from mlxinfer.output_format import OutputFormat, ReasoningFormat
from mlxinfer.output_format.format import HERMES
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES
from tests.support.schemas.tool_chats import TOOLS, calls_in, check_every_cut, random_call, read

QWEN = OutputFormat(ReasoningFormat("<think>", "</think>"), HERMES, "described")
ARGUMENTS = '{"city": "Pa\\"ris}"}'
CALL = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
EVENTS = [("call_begin", "get"), ("arguments", ARGUMENTS), ("call_end", "")]
PRETTY = '{\n  "name": "get",\n  "arguments": {\n    "city": "x"\n  }\n}'
PRETTY_EVENTS = [("call_begin", "get"), ("arguments", '{\n    "city": "x"\n  }'), ("call_end", "")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (CALL, EVENTS),
        ("\n\n" + CALL + "\n", EVENTS),
        (PRETTY, PRETTY_EVENTS),
        (f"```json\n{CALL}\n```", EVENTS),
        (f"```json\n{PRETTY}\n```", PRETTY_EVENTS),
        (f"```\n{CALL}\n```\n", EVENTS),
        (f"``` json\n{CALL}```", EVENTS),
        (f"```tool_call\n{CALL}\n", EVENTS),
        (f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", EVENTS),
        (f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n```", EVENTS * 2),
        (f"<tools>\n{CALL}\n</tools>", EVENTS),
        (f"<tools>\n{CALL}\n{CALL}\n</tools>", EVENTS * 2),
        (f"<tools>\n[{CALL}, {CALL}]\n</tools>", EVENTS * 2),
        (f"\n\n  {CALL}   \n", EVENTS),
        (f"<function_call> {CALL} </function_call>", EVENTS),
        (f"<tool_call>\n{CALL}\n</tool_call>", EVENTS),
        (f"{CALL}\n{CALL}", EVENTS * 2),
        (f"{CALL}\n\n{CALL}\n", EVENTS * 2),
        (f"{CALL}, {CALL}", EVENTS * 2),
        (f"{CALL}; {CALL}", EVENTS * 2),
        (f"{CALL} {CALL}", EVENTS * 2),
        (f"[{CALL}]", EVENTS),
        (f"[{CALL}", EVENTS),
        (f"[\n  {CALL},\n  {CALL}\n]\n", EVENTS * 2),
        (f"```json\n[{CALL}, {CALL}]\n```", EVENTS * 2),
        (f"```json\n{CALL}\n{CALL}\n```", EVENTS * 2),
        (f"```json\n{CALL}\n```\n\n```json\n{CALL}\n```", EVENTS * 2),
        (f"Let me look.\n\n```json\n{CALL}\n```", [("content", "Let me look."), *EVENTS]),
        (f"1. First:\n   ```json\n   {CALL}\n   ```", [("content", "1. First:"), *EVENTS]),
        (f"Let me look.\n{CALL}", [("content", "Let me look."), *EVENTS]),
        (f"```json\n{CALL}\n```\nDone.", [*EVENTS, ("content", "Done.")]),
        (f"{CALL}\nDone.", [*EVENTS, ("content", "Done.")]),
        (f"<think>\nso\n</think>\n\n{CALL}", [("reasoning", "so"), *EVENTS]),
        (f"```python\nx = {{}}\n```\n{CALL}", [("content", "```python\nx = {}\n```"), *EVENTS]),
        (f'{{"arguments": {ARGUMENTS}, "name": "get"}}', EVENTS),
        (f'{{"id": "a1", "type": "function", "name": "get", "arguments": {ARGUMENTS}}}', EVENTS),
        ('{"name": "get", "arguments": "{\\"city\\": 1}"}', [EVENTS[0], ("arguments", '{"city": 1}'), EVENTS[2]]),
        ('{"name": "get_weather", "arguments": {}}', [("call_begin", "get_weather"), ("arguments", "{}"), EVENTS[2]]),
        (f'{CALL}\n{{"temperature": 20}}', [*EVENTS, ("content", '{"temperature": 20}')]),
    ],
)
def test_calls_as_plain_json_are_read(text: str, events: list[tuple[str, str]]) -> None:
    assert read(QWEN, text) == events
    check_every_cut(QWEN, text, "", random.Random(1), 40)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "arguments": {"city": "x"}}',
        '```json\n{"name": "unknown", "arguments": {}}\n```',
        '{"name": "get"}',
        '{"name": "get", "arguments": [1]}',
        '{"name": "get", "arguments": 3}',
        '{"name": "get", "arguments": {"city": Paris}}',
        '{"name": "get", "arguments": {"city": "x"}, "result": 5}',
        '{"name": "get", "description": "does it", "parameters": {"type": "object", "properties": {}}}',
        '{"name": "get", "parameters": {"city": "x"}}',
        '{"name": "get", "arguments": {"city": "Lon',
        '{"name": "get", "arguments": {"city": "Lon"}',
        f"Write {CALL} to call it.",
        f"{CALL} is how it is written.",
        f"`{CALL}`",
        f"> {CALL}",
        f'```json\n{CALL}\n{{"x": 1}}\n```',
        f"```json\n{CALL}\nand so on\n```",
        f"```python\ncalls = [\n{CALL}\n]\n```",
        f"Look:\n```python\nimport x\n\n{CALL}\n```\n",
        f'{{\n  "calls": [\n    {CALL}\n  ]\n}}',
        f'{{"calls":\n{CALL}\n}}',
        f"[{CALL}, 5]",
        f"[\n{CALL},\n{CALL},\n5]",
        f"<div>{CALL}</div>",
        f"<tools>{CALL}</tool>",
        "[1, 2, 3]",
        "```\n",
        "```json\n[\n",
        "{",
        "<tools>",
    ],
)
def test_what_only_looks_like_a_call_is_text_and_whole(text: str) -> None:
    assert read(QWEN, text) == [("content", text)]
    check_every_cut(QWEN, text, "", random.Random(2), 40)


def test_text_that_cannot_become_a_call_is_not_held_back() -> None:
    for text in ('{"city": 1', "```python\nx", "[1", "<div>a"):
        assert read_so_far(text + " ") == text, text


def read_so_far(text: str) -> str:
    return "".join(event.text for event in OutputReader(QWEN, TOOLS).add(text)).rstrip()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_reads_plain_json_beside_its_own_form(family: str) -> None:
    own = FAMILIES[family]
    format = OutputFormat(own.reasoning, own.calls, "table", also=own.also, hidden=own.hidden)
    rng = random.Random(family)
    for _ in range(5):
        name, arguments = random_call(rng)
        text = json.dumps({"name": name, "arguments": arguments})
        for written in (text, f"```json\n{text}\n```", f"[{text}]"):
            assert calls_in(read(format, written)) == [(name, arguments)], written


def test_nothing_is_a_call_without_offered_tools() -> None:
    assert read(QWEN, CALL, tools={}) == [("content", CALL)]


def test_there_is_one_call_where_the_client_takes_one() -> None:
    for text in (
        f"{CALL}\n{CALL}",
        f"[{CALL}, {CALL}]",
        f"```json\n{CALL}\n```\n```json\n{CALL}\n```",
        f"<tool_call>{CALL}</tool_call>\n{CALL}",
    ):
        reader = OutputReader(QWEN, TOOLS, parallel=False)
        events = [*reader.add(text), *reader.finish()]
        assert len(calls_in(events)) == 1, text
        assert not any(event.kind == "content" for event in events)


def test_long_answers_that_only_look_like_calls_are_read_in_linear_time() -> None:
    """Held back or not: 100,000 characters in small pieces are a matter of a second, however hostile."""
    for text in ('{"name": "get"\n' * 8_000, "[\n" + f"{CALL},\n" * 2_000 + "5]", "```\n[\n" * 15_000, "<tools>\n{" * 10_000):
        assert read(QWEN, text, range(0, len(text), 7)) == [("content", text)]
