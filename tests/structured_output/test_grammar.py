"""Texts that compiled structures allow, over the tokens of a real vocabulary."""

import json
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory
from support.tokenizers.byte_tokenizer import byte_tokenizer

from mlxinfer.errors import SamplingError
from mlxinfer.structure import JSON_OBJECT, Choice, Lark, Regex, Schema
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tokenizer.tokenizer import from_directory

jsonschema = pytest.importorskip("jsonschema")
VOCAB = 96
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return from_directory(tiny_directory(tmp_path_factory.mktemp("model"), characters=JSON_CHARACTERS))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB)


def bits(row):
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def accepts(compiler, tokenizer, structure, text):
    """Return True if the whole text is allowed and may end there."""
    constraint = compiler.compile(structure)
    for token in tokenizer.encode(text, add_special_tokens=False):
        (row,) = constraint.rows([])
        if not bits(row)[token]:
            return False
        assert constraint.advance(token) == ""
    (end,) = tokenizer.eos_token_ids
    return bool(bits(constraint.rows([])[0])[end])


@pytest.mark.parametrize("rows", [VOCAB + 1, VOCAB + 32, 10 * VOCAB])
def test_an_embedding_larger_than_the_vocabulary(tokenizer, rows):
    constraint = GrammarCompiler(tokenizer, rows).compile(Regex("ab"))
    (row,) = constraint.rows([])
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:rows])
    assert set(allowed) == set(tokenizer.encode("a", add_special_tokens=False))


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Schema(PERSON), ['{"name": "Ann", "age": 7}', '{\n  "name": "",\n  "age": 120\n}'], ['{"name": "Annabel", "age": 7}']),
        (Schema(PERSON), [], ['{"name": "Ann"}', '{"age": 7, "name": "Ann"}', '{"name": "Ann", "age": 121}', "[]"]),
        (Schema(True), ["1", '{"a": [null]}'], ["x"]),
        (JSON_OBJECT, ["{}", '{"a": {"b": [1.5e3]}}'], ["[]", "1"]),
        (Regex(r"\d{4}-\d\d"), ["2026-11"], ["2026-1", "2026-111", "x2026-11"]),
        (Choice(["yes", "no", 'a "quoted" one\n']), ["yes", 'a "quoted" one\n'], ["maybe", "yesno", ""]),
        (Lark('start: "a" b\nb: "b" | "c" b'), ["ab", "accb"], ["a", "abb"]),
        (Lark('root ::= "x" [0-9]+'), ["x12"], ["x", "12"]),
        (Schema({"type": "number", "format": "float"}), ["1.5"], ["one"]),
        (Schema({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}), ['{"a": 1}'], ['{"a": ""}']),
    ],
)  # fmt: skip
def test_texts_that_fit_are_allowed_and_others_are_not(compiler, tokenizer, structure, good, bad):
    for text in good:
        assert accepts(compiler, tokenizer, structure, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, structure, text), text


def test_whitespace_is_bounded(compiler, tokenizer):
    assert accepts(compiler, tokenizer, Schema(PERSON), '{"name":"A",\n' + " " * 40 + '"age": 1}')
    assert not accepts(compiler, tokenizer, Schema(PERSON), '{"name":"A",\n' + " " * 41 + '"age": 1}')
    assert not accepts(compiler, tokenizer, Schema(PERSON), '{"name":"A",\n\n"age": 1}')


def test_pydantic_decimals_can_be_held(compiler, tokenizer):
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    schema = Schema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]})
    for text in ('"1.50"', '"-3"', '".5"', "2.5"):
        assert accepts(compiler, tokenizer, schema, text)
    assert not accepts(compiler, tokenizer, schema, '"-"')


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Schema({"properties": {"a": {"type": "array", "uniqueItems": True}}}), r"cannot be held at properties\.a: .*uniqueItems"),
        (Schema({"$defs": {"x": {"not": {}}}, "properties": {"b": {"$ref": "#/$defs/x"}}}), r"\$defs\.x|properties\.b"),
        (Schema({"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}), r"at properties\.p: .*look-around"),
        (Schema({"type": "foo"}), "Invalid type: foo"),
        (Schema(False), "no JSON fits"),
        (Schema({"$ref": "https://example.com/schema"}), "is not in the schema: write a pointer"),
        (Schema({"$ref": "#/definitions/none"}), "no schema at #/definitions/none"),
        (Schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (Schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf instead"),
        (Regex("("), "regex: .*unclosed group"),
        (Regex("a(?=b)"), "look-around"),
        (Lark("start: nothing"), "grammar: .*unknown name"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_named_in_one_line(compiler, structure, message):
    with pytest.raises(SamplingError, match=message) as error:
        compiler.compile(structure)
    assert "\n" not in str(error.value)


def test_added_tokens_that_are_text_may_stand_in_strings():
    """Gemma's HTML tags look like special tokens but are plain text."""
    tokenizer = byte_tokenizer(words=("<table>",))
    tag, special = (tokenizer.encode(text)[-1] for text in ("<table>", "<|mark|>"))
    constraint = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(Schema({"type": "string"}))
    for token in tokenizer.encode('"a', add_special_tokens=False):
        constraint.advance(token)
    row = np.unpackbits(constraint.rows([])[0].view(np.uint8), bitorder="little")
    assert (row[tag], row[special]) == (1, 0)


def test_rows_leave_the_state_and_show_each_draft(compiler, tokenizer):
    constraint = compiler.compile(Schema(PERSON))
    drafts = tokenizer.encode('{"name":', add_special_tokens=False)
    rows = constraint.rows(drafts)
    assert rows.shape == (len(drafts) + 1, 3)
    for row, token in zip(rows, drafts, strict=False):
        assert np.array_equal(constraint.rows([])[0], row)
        constraint.advance(token)
    assert np.array_equal(constraint.rows([])[0], rows[-1])


def test_drafts_are_cut_where_they_stop_to_fit(compiler, tokenizer):
    constraint = compiler.compile(Schema(PERSON))
    assert constraint.allowed(tokenizer.encode('{"nope', add_special_tokens=False)) == 3
    assert constraint.allowed([]) == 0


def test_forced_tokens_are_those_without_a_choice(compiler, tokenizer):
    constraint = compiler.compile(Choice(["abcdef", "abcxyz"]))
    assert tokenizer.decode(constraint.forced()) == "abc"
    for token in constraint.forced():
        constraint.advance(token)
    assert constraint.forced() == []


def test_a_copy_goes_its_own_way(compiler, tokenizer):
    one = compiler.compile(Choice(["ab", "cd"]))
    two = one.copy()
    first, other = tokenizer.encode("ac", add_special_tokens=False)
    assert one.advance(first) == two.advance(other) == ""
    assert not np.array_equal(one.rows([])[0], two.rows([])[0])


def test_a_token_that_does_not_fit_is_told(compiler, tokenizer):
    constraint = compiler.compile(Choice(["ab"]))
    (wrong,) = tokenizer.encode("z", add_special_tokens=False)
    assert "does not fit" in constraint.advance(wrong)


def test_threads_share_a_compiler(tokenizer):
    compiler, found = GrammarCompiler(tokenizer, VOCAB), []
    structures = [Choice([f"{i}", "x"]) for i in range(6)] * 2
    threads = [Thread(target=lambda one=one: found.append(compiler.compile(one).rows([]))) for one in structures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(structures)


names = st.text("abcd", min_size=1, max_size=3)
leaves = st.sampled_from(
    [
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": -5, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", "bc", 4]},
        {"const": {"x": 1}},
    ]
)
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            lambda properties, closed: {"type": "object", "properties": properties, "required": sorted(properties)[:2], **closed},
            st.dictionaries(names, inner, max_size=3),
            st.just({"additionalProperties": False}),
        )
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(schemas, st.randoms(use_true_random=False))
def test_whatever_is_allowed_validates(compiler, tokenizer, schema, random):
    """A model that says anything at random, as far as it may."""
    constraint, (end,) = compiler.compile(Schema(schema)), tokenizer.eos_token_ids
    said = []
    for _ in range(400):
        allowed = np.flatnonzero(bits(constraint.rows([])[0]))
        token = end if end in allowed else int(random.choice(list(allowed)))
        if token == end:
            break
        assert constraint.advance(token) == ""
        said.append(token)
    else:
        return
    jsonschema.validate(json.loads(tokenizer.decode(said)), schema)
