"""The parts of answers: where reasoning begins and ends, what is a call, and that nothing else is lost."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.output_format import CallFormat, OutputFormat, ReasoningFormat
from mlxinfer.output_format.format import HERMES
from mlxinfer.output_format.history import write_calls
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES
from tests.support.schemas.tool_chats import TOOLS, calls_in, check_every_cut, random_calls, read

THINK = ReasoningFormat("<think>", "</think>")
QWEN = OutputFormat(THINK, HERMES, "described")
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Pa\\"ris"}}\n</tool_call>'
NO_QUOTES = [("call_begin", "get"), ("arguments", '{"city":"x"}'), ("call_end", "")]
CALL_EVENTS = [("call_begin", "get"), ("arguments", '{"city": "Pa\\"ris"}'), ("call_end", "")]


def _format(name: str) -> OutputFormat:
    family = FAMILIES[name]
    return OutputFormat(family.reasoning or THINK, family.calls, "table", also=family.also, hidden=family.hidden)


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("Hello.\n", [("content", "Hello.\n")]),
        ("<think>\nhm, so\n</think>\n\nHello.", [("reasoning", "hm, so"), ("content", "Hello.")]),
        ("<think>\n\n</think>\n\nHello.", [("content", "Hello.")]),
        ("<think>" + "\n" * 150 + "<think>a", [("reasoning", "<think>a")]),
        ("<think><think><think>", [("reasoning", "<think><think>")]),
        (CALL + " " * 150 + "!", [*CALL_EVENTS, ("content", "!")]),
        ("a" + "\n" * 150 + "b", [("content", "a" + "\n" * 150 + "b")]),
        (
            '<tool_call>{"name": "get", "arguments": {"a":  \n 12 , "b" : [ ]\n}}',
            [CALL_EVENTS[0], ("arguments", '{"a":  \n 12 , "b" : [ ]\n}'), CALL_EVENTS[2]],
        ),
        ("<think>never ends", [("reasoning", "never ends")]),
        ("Sure.\n\n" + CALL, [("content", "Sure."), *CALL_EVENTS]),
        (CALL + "\n" + CALL, CALL_EVENTS * 2),
        (CALL + "\nDone.", [*CALL_EVENTS, ("content", "Done.")]),
        ("<think>a</think>" + CALL, [("reasoning", "a"), *CALL_EVENTS]),
        ('<tool_call>{"arguments": {"city": "x"}, "name": "get"}', [CALL_EVENTS[0], ("arguments", '{"city": "x"}'), CALL_EVENTS[2]]),
        (
            '<tool_call>{"name": "get", "arguments": "{\\"city\\": 1}"}</tool_call>',
            [CALL_EVENTS[0], ("arguments", '{"city": 1}'), CALL_EVENTS[2]],
        ),
        ('<tool_call>{"name": "get"}</tool_call>', [CALL_EVENTS[0], ("arguments", "{}"), CALL_EVENTS[2]]),
        (
            '<tool_call>{"name": "get", "arguments": {"a": 1}</tool_call>!',
            [CALL_EVENTS[0], ("arguments", '{"a": 1}'), CALL_EVENTS[2], ("content", "!")],
        ),
        ('<tool_call>{"name": "get", "arguments": {"city": "Lon', [CALL_EVENTS[0], ("arguments", '{"city": "Lon')]),
    ],
)
def test_answers_are_told_apart(text: str, events: list[tuple[str, str]]) -> None:
    assert read(QWEN, text) == events
    check_every_cut(QWEN, text, "", random.Random(1), 30)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": 3}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{name: "get"}\n</tool_call>',
        '<tool_call>\n{"tool": "get"}\n</tool_call>',
        '<tool_call>\n{"arguments": {"city": "x"}',
        "Write <tool_call> before a call, and </tool_call> after it.",
        "a < b, and <think is no tag",
        "<tool_call>",
        "<tool_call>\n{",
        "ends with <tool_ca",
    ],
)
def test_what_is_no_call_is_text_and_whole(text: str) -> None:
    assert read(QWEN, text) == [("content", text)]
    check_every_cut(QWEN, text, "", random.Random(2), 30)


def test_a_call_in_what_looked_like_one_is_read() -> None:
    assert read(QWEN, "<tool_call><tool_call>" + CALL) == [("content", "<tool_call><tool_call>"), *CALL_EVENTS]


def test_without_tools_nothing_is_a_call() -> None:
    assert read(QWEN, CALL, tools={}) == [("content", CALL)]


@pytest.mark.parametrize(
    ("begun", "text", "events"),
    [
        ("<|im_start|>assistant\n<think>\n", "so\n</think>\n\nYes.", [("reasoning", "so"), ("content", "Yes.")]),
        ("<|im_start|>assistant\n<think>\n", "<think>\nso</think>Yes.", [("reasoning", "so"), ("content", "Yes.")]),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes.", [("content", "Yes.")]),
        ("<|im_start|>assistant\n", "Yes.", [("content", "Yes.")]),
        ("user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "A tag.", [("content", "A tag.")]),
        ("<think>", "only thoughts", [("reasoning", "only thoughts")]),
        ("<think>", "a </thin b </think>" + CALL, [("reasoning", "a </thin b"), *CALL_EVENTS]),
    ],
)
def test_where_reasoning_begins_is_read_from_the_prompt(begun: str, text: str, events: list[tuple[str, str]]) -> None:
    assert read(QWEN, text, begun=begun) == events
    check_every_cut(QWEN, text, begun, random.Random(3), 30)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought", "<channel|>"),
        ("<seed:think>", "</seed:think>"),
    ],
)
def test_other_spellings_of_reasoning(begin: str, end: str) -> None:
    format = OutputFormat(ReasoningFormat(begin, end), HERMES, "table")
    for begun, text in (("", f"{begin}\nso{end}Yes."), (f"x{begin}\n", f"so{end}Yes.")):
        assert read(format, text, begun=begun) == [("reasoning", "so"), ("content", "Yes.")]
        check_every_cut(format, text, begun, random.Random(4), 20)


HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city":"x"}<|call|>'


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("<|channel|>final<|message|>Hi.<|return|>", [("content", "Hi.")]),
        (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
            [("reasoning", "so"), ("content", "Hi.")],
        ),
        ("<|channel|>analysis<|message|>so<|end|>" + HARMONY_CALL, [("reasoning", "so"), *NO_QUOTES]),
        (' to=functions.get<|channel|>commentary json<|message|>{"city":"x"}<|call|>', NO_QUOTES),
        ("<|channel|>commentary<|message|>I look it up.<|end|>" + HARMONY_CALL, [("content", "I look it up."), *NO_QUOTES]),
    ],
)
def test_channels_of_harmony(text: str, events: list[tuple[str, str]]) -> None:
    format, begun = _format("harmony"), "<|end|><|start|>assistant"
    assert read(format, text, begun=begun) == events
    check_every_cut(format, text, begun, random.Random(5), 20)


def test_a_prompt_may_begin_a_call() -> None:
    """Functionary's prompts end with ">>>", and its models go on with a tool's name, or "all"."""
    format = _format("functionary")
    assert read(format, 'get\n{"city":"x"}', begun="assistant\n\n>>>") == NO_QUOTES
    assert read(format, "all\nHello", begun="assistant\n\n>>>") == [("content", "Hello")]
    assert read(format, "get lost", begun="assistant\n\n>>>") == [("content", "get lost")]


def test_a_bare_object_is_a_call_only_where_the_answer_begins() -> None:
    format = _format("llama3")
    call = '{"name": "get", "parameters": {"city": "x"}}'
    assert calls_in(read(format, call)) == [("get", {"city": "x"})]
    assert read(format, f"Such as {call}") == [("content", f"Such as {call}")]
    assert read(format, '{"answer": 42}') == [("content", '{"answer": 42}')]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_are_written_are_read_back(family: str) -> None:
    rng, format = random.Random(family), _format(family)
    assert format.calls is not None
    for number in range(10):
        calls = random_calls(rng, format.calls.parallel and number > 0)
        text = write_calls(format.calls, calls)
        assert calls_in(read(format, text)) == calls, text
        if number == 0:
            check_every_cut(format, text, "", rng, 10)


_FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        '{"name": "get"',
        '"arguments": {',
        '"city": "',
        '"',
        ", ",
        ":",
        "\n",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "get",
        "get_weather",
        "<function=",
        "<parameter=",
        "city",
        ">",
        "</parameter>",
        "</function>",
        "call:",
        "(",
    ),
    *(
        '<|"|>',
        "<|tool_call>",
        "<tool_call|>",
        "[",
        "]",
        ")",
        "city='",
        "'",
        "\\",
        "1",
        "-",
        "word ",
        " ",
        "<invoke name=",
        "ü🦊",
        "<![CDATA[",
    ),
]


@pytest.mark.parametrize("family", ["hermes", "mistral", "qwen3-coder", "gemma4", "pythonic", "llama3", "harmony", "minimax-m2"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_text_gives_the_same_events_and_is_not_lost(family: str, data: st.DataObject) -> None:
    format = _format(family)
    calls = format.calls
    assert calls is not None
    literals = [text for text in (calls.begin, calls.call_end, calls.name_end, calls.key_begin, calls.key_end, calls.value_end) if text]
    text = "".join(data.draw(st.lists(st.sampled_from([*_FRAGMENTS, *literals, *literals]), max_size=25)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    whole = read(format, text)
    assert read(format, text, cuts) == whole
    assert read(format, text, range(len(text))) == whole
    if not any(kind in ("call_begin", "reasoning") for kind, _ in whole):
        written = "".join(piece for _, piece in whole)
        assert _without_marks(text, format) == _without_marks(written, format)


def _without_marks(text: str, format: OutputFormat) -> str:
    """The text without whitespace, the marks of (empty) reasoning and the literals around content."""
    marks = [*format.hidden, format.reasoning.begin if format.reasoning else "", format.reasoning.end if format.reasoning else ""]
    for mark in sorted(filter(None, marks), key=len, reverse=True):
        text = text.replace(mark, "")
    return "".join(text.split())


def test_a_broken_off_tagged_call_keeps_what_was_written() -> None:
    format = _format("qwen3-coder")
    text = "<tool_call>\n<function=get>\n<parameter=city>\nPar</para"
    assert read(format, text) == [("call_begin", "get"), ("arguments", '{"city": "Par</para')]


def test_values_get_the_types_of_the_schema() -> None:
    calls = FAMILIES["qwen3-coder"].calls
    text = (
        "<tool_call>\n<function=get>\n<parameter=city>\n3\n</parameter>\n<parameter=count>\n3\n</parameter>\n<parameter=flag>\nTrue\n"
        "</parameter>\n<parameter=options>\n{'a': None}\n</parameter>\n<parameter=ratio>\nmuch\n</parameter>\n<parameter=other>\n7\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    expected = {"city": "3", "count": 3, "flag": True, "options": {"a": None}, "ratio": "much", "other": 7}
    assert calls_in(read(OutputFormat(None, calls, "table"), text)) == [("get", expected)]


def test_control_characters_and_bad_escapes_are_mended() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"city": "a\nb\\\'c\\d"}}</tool_call>'
    assert calls_in(read(QWEN, text)) == [("get", {"city": "a\nb'c\\d"})]


def test_long_texts_are_read_in_linear_time() -> None:
    """Held back or not: 200,000 characters in small pieces are a matter of a second, however hostile."""
    for text in (
        '<tool_call>{"arguments": {"city": "' + "x" * 100_000,
        "<tool_call>" * 5_000,
        "<think>" + "<" * 50_000,
        "\n" * 20_000 + "<" * 20_000,
    ):
        whole = read(QWEN, text)
        assert read(QWEN, text, range(0, len(text), 7)) == whole


def test_a_call_of_many_pieces_is_json() -> None:
    reader = OutputReader(QWEN, TOOLS)
    text, pieces = '<tool_call>\n{"name": "write-file", "arguments": {"city": "' + "line\\n" * 50 + '"}}\n</tool_call>', []
    for letter in text:
        pieces += [event.text for event in reader.add(letter) if event.kind == "arguments"]
    assert len(pieces) > 100
    assert json.loads("".join(pieces)) == {"city": "line\n" * 50}


def test_literals_tell_special_tokens_of_the_format() -> None:
    format = OutputFormat(THINK, CallFormat("json", call_begin="<|call|>", name_end="<|args|>"), "table")
    literals = "".join(format.literals())
    assert "<|call|>" in literals
    assert "</think>" in literals
    assert "<|im_end|>" not in literals
