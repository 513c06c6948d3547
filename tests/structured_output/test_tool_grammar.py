"""Grammars of calls accept each format's calls and reject calls of other tools."""

from __future__ import annotations

import json

import pytest
from support.tokenizers.byte_tokenizer import byte_tokenizer

from mlxinfer.errors import PromptError, SamplingError
from mlxinfer.output_format.format import HERMES, CallFormat, OutputFormat
from mlxinfer.output_format.history import write_calls
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.structure import Choice, Lark, Regex, Schema
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.structured_output.tool_grammar import ToolGrammars
from mlxinfer.tools import Tool, offered

TOKENIZER = byte_tokenizer()
END = min(TOKENIZER.eos_token_ids)
SPECIAL = "<|mark|>"

FORMATS = {
    "hermes": HERMES,
    "bare": CallFormat("object", arguments_key="parameters", parallel=False),
    "list": CallFormat("object", section_begin=f"{SPECIAL}[", separator=", ", section_end="]"),
    "named": CallFormat("json", call_begin=SPECIAL, name_end="[ARGS]"),
    "kimi": CallFormat(
        "json",
        section_begin="<section>",
        call_begin="<call>functions.",
        name_end=":{id}<args>",
        call_end="</call>",
        section_end="</section>",
    ),
    "coder": CallFormat(
        "tagged",
        call_begin="<tool_call>\n<function=",
        name_end=">\n",
        key_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
        call_end="</function>\n</tool_call>",
        separator="\n",
    ),
    "keyed": CallFormat(
        "tagged", call_begin="<call>", name_end="\n", key_begin="<", key_end=">", value_end="</{key}>\n", call_end="</call>"
    ),
    "gemma": CallFormat("gemma", call_begin="<call>call:", call_end="</call>", quote=SPECIAL),
    "pythonic": CallFormat("pythonic", section_begin="[", name_end="(", call_end=")", separator=", ", section_end="]"),
}
WEATHER = Tool(
    "get_weather",
    parameters=Schema(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["c", "f"]},
                "near": {"type": "array", "items": {"type": "string"}},
                "exact": {"type": "boolean"},
            },
            "required": ["city"],
            "additionalProperties": False,
        }
    ),
)
PLAY = Tool("play", parameters=Schema({"type": "object", "properties": {"song": {"type": "string"}}, "required": ["song"]}))
TOOLS = offered([WEATHER, PLAY])
CALLS = [
    ("get_weather", {"city": 'São Paulo, "SP" it\'s <b>', "days": -3, "unit": "c", "near": ["a", "b"], "exact": True}),
    ("get_weather", {"city": "x"}),
    ("play", {"song": "one\ntwo"}),
]


@pytest.fixture(scope="module")
def grammars():
    return ToolGrammars(GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size))


def accepts(constraint, text):
    """Return True if a grammar accepts a text and may end there."""
    constraint = constraint.copy()
    if any(constraint.advance(token) for token in TOKENIZER.encode(text, add_special_tokens=False)):
        return False
    return bool(constraint.rows([])[0][END // 32] >> (END % 32) & 1)


FORMATS |= {f"family {name}": family.calls for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_format_writes_is_accepted_and_read_back(grammars, name):
    calls = FORMATS[name]
    constraint = grammars.compile(calls, TOOLS, parallel=True).constraint
    made = CALLS if calls.parallel else CALLS[:1]
    text = write_calls(calls, made)
    assert accepts(constraint, text), text
    assert all(accepts(constraint, write_calls(calls, [each])) for each in made)
    reader = OutputReader(OutputFormat(None, calls, "option"), TOOLS)
    events = [*reader.add(text), *reader.finish()]
    assert [event.text for event in events if event.kind == "call_begin"] == [each for each, _ in made]


@pytest.mark.parametrize("name", FORMATS)
def test_what_fits_no_tool_is_refused(grammars, name):
    calls = FORMATS[name]
    constraint = grammars.compile(calls, TOOLS, parallel=True).constraint
    wrong = [("get_weathers", {"city": "x"}), ("get_weather", {}), ("get_weather", {"city": "x", "day": 1}), ("play", {"city": "x"})]
    wrong += [("get_weather", {"city": "x", "days": "two"}), ("get_weather", {"city": "x", "unit": "k"})]
    for each in wrong:
        assert not accepts(constraint, write_calls(calls, [each])), each
    assert not accepts(constraint, "Hello")
    assert not accepts(constraint, "")


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_no_letter_of_a_name_or_a_key_may_be_another(grammars, name):
    calls = FORMATS[name]
    constraint = grammars.compile(calls, TOOLS, parallel=True).constraint
    made = CALLS if calls.parallel else CALLS[:1]
    text = write_calls(calls, made)
    for word in ("get_weather", "city", "days", "play", "song"):
        for place in range(len(word)):
            changed = text.replace(word, word[:place] + ("y" if word[place] == "x" else "x") + word[place + 1 :], 1)
            assert changed == text or not accepts(constraint, changed), changed


def test_what_the_prompt_has_begun_is_not_written_again(grammars):
    calls = FAMILIES["harmony"].calls
    text = write_calls(calls, CALLS[:1])
    written = "<|start|>assistant"
    assert accepts(grammars.compile(calls, TOOLS, parallel=True, written=written).constraint, text.removeprefix(written))


def test_a_short_beginning_needs_a_name(grammars):
    """The header of Functionary's content is not a call."""
    found = grammars.compile(FAMILIES["functionary"].calls, TOOLS, parallel=True, free=True)
    assert found.triggers == (b">>>get_weather", b">>>play")
    assert not found.at_start
    assert grammars.compile(FAMILIES["llama3"].calls, TOOLS, parallel=True, free=True).at_start


@pytest.mark.parametrize("name", [name for name, calls in FORMATS.items() if calls.parallel])
def test_one_call_where_there_may_be_one(grammars, name):
    constraint = grammars.compile(FORMATS[name], TOOLS, parallel=False).constraint
    assert accepts(constraint, write_calls(FORMATS[name], CALLS[1:2]))
    assert not accepts(constraint, write_calls(FORMATS[name], CALLS[1:]))


@pytest.mark.parametrize("name", ["coder", "keyed", "gemma", "pythonic"])
def test_arguments_come_in_any_order_each_once(grammars, name):
    constraint = grammars.compile(FORMATS[name], TOOLS, parallel=True).constraint
    turned = ("get_weather", {"days": 2, "exact": False, "city": "x"})
    text = write_calls(FORMATS[name], [turned])
    assert accepts(constraint, text)
    once = write_calls(FORMATS[name], [("get_weather", {"city": "x"})])
    first, _, rest = once.partition("city")
    argument = write_calls(FORMATS[name], [("get_weather", {"city": "x", "days": 1})])
    twice = argument.replace("days", "city")
    assert first
    assert rest
    assert not accepts(constraint, twice)


def test_strict_schemas_that_cannot_be_held_are_refused_and_others_are_any_object(grammars, caplog):
    broken = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}, "required": ["x"]}
    with pytest.raises(PromptError, match="f: its schema cannot be held, which strict asks for: regex parse error"):
        grammars.compile(HERMES, offered([Tool("f", parameters=Schema(broken), strict=True)]), parallel=True)
    for name in ("hermes", "coder", "gemma"):
        caplog.clear()
        tools = offered([Tool(f"g_{name}", parameters=Schema({**broken, "not": {}}))])
        constraint = grammars.compile(FORMATS[name], tools, parallel=True).constraint
        assert f"tool g_{name}: its schema cannot be held" in caplog.text
        assert accepts(constraint, write_calls(FORMATS[name], [(f"g_{name}", {"x": "anything"})]))


def test_tools_that_are_too_many_together_are_refused(grammars):
    words = [[f"{i}{number:0>200}" for number in range(700)] for i in range(3)]
    tools = [Tool(f"f{i}", parameters=Schema({"type": "object", "properties": {"x": {"enum": words[i]}}})) for i in range(3)]
    with pytest.raises(PromptError, match=r"tools: their schemas cannot be held together: .* bytes"):
        grammars.compile(HERMES, offered(tools), parallel=True)


def test_a_structure_and_tools_are_either(grammars):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    for structure, text in ((Schema(schema), '{"x": 3}'), (Regex("[a/]{3}"), "a/a"), (Choice(["yes", "no"]), "no")):
        constraint = grammars.compile(HERMES, TOOLS, parallel=True, structure=structure).constraint
        assert accepts(constraint, text)
        assert accepts(constraint, write_calls(HERMES, CALLS))
        assert not accepts(constraint, "Hello")
    with pytest.raises(SamplingError, match="a grammar cannot be combined with tools"):
        grammars.compile(HERMES, TOOLS, parallel=True, structure=Lark('start: "a"'))


def test_many_optional_arguments(grammars):
    """More than can be counted keep their order."""
    properties = {f"key{i}": {"type": "string"} for i in range(80)}
    tool = Tool("many", parameters=Schema({"type": "object", "properties": properties}))
    for name in ("coder", "pythonic"):
        constraint = grammars.compile(FORMATS[name], offered([tool]), parallel=True).constraint
        assert accepts(constraint, write_calls(FORMATS[name], [("many", {"key1": "a", "key79": "b"})]))


def test_the_same_tools_are_compiled_once(grammars):
    again = offered([Tool.from_dict(json.loads(json.dumps(tool.as_openai()))) for tool in TOOLS.values()])
    assert grammars.compile(HERMES, again, parallel=True) is grammars.compile(HERMES, TOOLS, parallel=True)
