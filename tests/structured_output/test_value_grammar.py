"""Lengths, ranges and patterns in arguments that are not JSON are enforced, or refused for strict tools."""

import random
import re

import pytest
from support.tokenizers.byte_tokenizer import byte_tokenizer
from test_tool_grammar import FORMATS, accepts

from mlxinfer.errors import PromptError
from mlxinfer.output_format.history import write_calls
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.structured_output.tool_grammar import ToolGrammars
from mlxinfer.structured_output.value_grammar import whole_text
from mlxinfer.tools import offered

jsonschema = pytest.importorskip("jsonschema")
TOKENIZER = byte_tokenizer()
HELD = {
    "length": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", 'a\n\\"', "äöü€"], ["", "a", "abcde"]),
    "least": ({"type": "string", "minLength": 1}, ["a", "abcdefgh"], [""]),
    "pattern": ({"type": "string", "pattern": "^[a-z]+/\\d{2}$"}, ["ab/12", "z/00"], ["ab/1", "/12", "ab/123", "ab/١٢"]),
    "found": ({"type": "string", "pattern": "b+|x"}, ["abc", "x", "1bb"], ["ac", ""]),
    "both": ({"type": "string", "pattern": "^a", "maxLength": 3}, ["a", "abc"], ["abcd", "ba"]),
    "integer": ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 9, 12], [-4, 13, 100, 1.5]),
    "number": ({"type": "number", "exclusiveMinimum": 0, "maximum": 2.5}, [0.25, 1, 2.5], [0, -1, 2.75, 3]),
    "multiple": ({"type": "integer", "multipleOf": 5}, [0, 15, -20], [3, 12]),
    "items": (
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 3},
        [[0, 1], [1, 2, 3]],
        [[], [1], [1, 2, 3, 4], [1, -2]],
    ),
    "one item": ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [[], [7]], [[1, 2]]),
    "no item": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "inside": (
        {"type": "object", "properties": {"s": {"type": "string", "maxLength": 1}}, "required": ["s"]},
        [{"s": "a"}, {"s": ""}],
        [{"s": "ab"}, {}],
    ),
    "named": ({"type": "object", "additionalProperties": {"type": "integer", "maximum": 3}}, [{}, {"a": 3}], [{"a": 4}, {"a": "b"}]),
    "either": ({"type": ["integer", "string"], "minimum": 3, "maxLength": 2}, [3, "", "ab"], [2, "abc"]),
    "other type": ({"type": "boolean", "minimum": 3, "maxLength": 1}, [True, False], [1]),
    "any of": ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}, [5, None], [4, "a"]),
}


@pytest.fixture(scope="module")
def grammars():
    return ToolGrammars(GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size))


def tool(schema, *, strict=True):
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}
    return offered([{"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}])


@pytest.mark.parametrize("form", ["pythonic", "gemma"])
@pytest.mark.parametrize("name", HELD)
def test_what_is_asked_of_a_value_is_held(grammars, name, form):
    schema, right, wrong = HELD[name]
    constraint = grammars.compile(FORMATS[form], tool(schema), parallel=False).constraint
    for value in right:
        jsonschema.validate(value, schema)
        assert accepts(constraint, write_calls(FORMATS[form], [("f", {"v": value})])), value
    for value in wrong:
        assert not accepts(constraint, write_calls(FORMATS[form], [("f", {"v": value})])), value


REFUSED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "minProperties": {"type": "object", "minProperties": 2},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}]},
    "pattern 'a": {"type": "string", "pattern": "a|^b$"},
    "minLength must be a whole number": {"type": "string", "minLength": "3"},
    "maxItems is below minItems": {"type": "array", "minItems": 3, "maxItems": 1},
    "minimum is not supported": {"anyOf": [{"type": "integer"}], "minimum": 3},
    "maxLength is not supported": {"enum": ["abc", "a"], "maxLength": 2},
    "required without properties": {"type": "object", "required": ["a"]},
}


@pytest.mark.parametrize("form", ["pythonic", "gemma"])
@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_held_is_refused_where_a_tool_is_strict(grammars, told, form, caplog):
    with pytest.raises(PromptError, match=rf"tools: f: its schema cannot be held, which strict asks for: .*{re.escape(told)}"):
        grammars.compile(FORMATS[form], tool(REFUSED[told]), parallel=False)
    assert grammars.compile(FORMATS[form], tool(REFUSED[told], strict=False), parallel=False)
    assert told in caplog.text


def test_a_pattern_is_that_of_the_whole_text():
    examples = {"^a$": "a", "^\\$": "$x", "a\\$": "xa$", "[$^]": "^", "^[\\d.]+$": "1.5", "(a|b)c$": "xbc", "^[^a]$": "\n", "\\\\$": "x\\"}
    for pattern, text in examples.items():
        whole = whole_text(pattern)
        assert whole is not None
        assert re.fullmatch(whole, text), (pattern, whole)
        assert re.search(pattern, text)
    assert [whole_text(each) for each in ("a^b", "a$b", "^a|b", "a|b$", "(^a)")] == [None] * 5
    chance = random.Random(0)
    for _ in range(300):
        pattern = "".join(chance.choice(["a", "b", "[ab]", "(a|b)", "a*", "\\d", "\\."]) for _ in range(chance.randint(1, 4)))
        pattern = chance.choice(["", "^"]) + pattern + chance.choice(["", "$"])
        text = "".join(chance.choice("ab1.") for _ in range(chance.randint(0, 5)))
        assert bool(re.fullmatch(whole_text(pattern) or "", text)) == bool(re.search(pattern, text)), (pattern, text)


ANY = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("form", "text", "schema"),
    [
        ("pythonic", '[f(v="it\'s")]', {"type": "string", "maxLength": 4}),
        ("pythonic", r"[f(v='\u2028\x1b')]", {"type": "string"}),
        ("pythonic", '[f(v="a")]', {"enum": ["a"]}),
        ("pythonic", '[f(v="a/12")]', {"type": "string", "pattern": "^[a-z]+/\\d{2}$"}),
        ("pythonic", '[f(v={"s": "a"})]', {"type": "object", "properties": {"s": {"type": "string"}}}),
        ("pythonic", "[f(v={'a': {\"b\": [true, None]}})]", ANY),
        ("gemma", "<call>call:f{v:{a b:{c:[1,{}]},d:None}}</call>", ANY),
        ("coder", "<tool_call>\n<function=f>\n<parameter=v>\nTrue\n</parameter>\n</function>\n</tool_call>", {"type": "boolean"}),
    ],
)
def test_what_templates_write_may_be_written(grammars, form, text, schema):
    assert accepts(grammars.compile(FORMATS[form], tool(schema), parallel=False).constraint, text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(("gemma", f"<call>call:f{{v:{{{key}:1}}}}</call>") for key in ("a=b", "a(b", "a)")),
        *(("pythonic", rf"[f(v={{'a': '\{half}'}})]") for half in ("ud800", "udfff")),
    ],
)
def test_what_could_not_be_read_may_not_be_written(grammars, form, text):
    assert not accepts(grammars.compile(FORMATS[form], tool(ANY), parallel=False).constraint, text)


def test_a_tool_without_arguments_gets_none(grammars):
    offer = offered([{"name": "f", "parameters": ANY}])
    constraint = grammars.compile(FORMATS["gemma"], offer, parallel=False).constraint
    assert accepts(constraint, "<call>call:f{}</call>")
    assert not accepts(constraint, "<call>call:f{a:1}</call>")
