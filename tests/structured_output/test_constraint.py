"""A constraint depends on the previous tokens only, not on how they arrived."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer.structure import Regex, Schema
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.structured_output.number_limits import BEGINNING, MOST_DIGITS, MOST_EXPONENT_DIGITS, NumberLimit
from mlxinfer.tokenizer.tokenizer import from_directory

VOCAB = 96
STRUCTURES = [
    Schema({"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "number"}}, "required": ["name", "n"]}),
    Schema({"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]}, "maxItems": 4}),
    Schema(True),
    Regex("(word|verb){1,4}-[0-9]{3}"),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return GrammarCompiler(from_directory(tiny_directory(tmp_path_factory.mktemp("model"), characters=JSON_CHARACTERS)), VOCAB)


def allowed(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def walk(constraint, random, steps, ends):
    """Tokens of a random answer, and the mask before each of them and after the last."""
    tokens, rows = [], [constraint.rows([])[0]]
    for _ in range(steps):
        choices = [int(token) for token in allowed(rows[-1]) if token not in ends]
        if not choices:
            break
        tokens.append(random.choice(choices))
        assert constraint.advance(tokens[-1]) == ""
        rows.append(constraint.rows([])[0])
    return tokens, np.stack(rows)


def parts(count, random):
    """`count` tokens cut anywhere: some are drafts that hold, others are taken one by one."""
    while count:
        part = random.randint(1, count)
        yield part
        count -= part


@settings(deadline=None)
@given(st.sampled_from(STRUCTURES), st.randoms(use_true_random=False))
def test_any_split_of_drafts_gives_the_same_masks(compiler, structure, random):
    compiled, ends = compiler.compile(structure), compiler.tokenizer.eos_token_ids
    tokens, rows = walk(compiled.copy(), random, 40, ends)
    constraint, at = compiled.copy(), 0
    for part in parts(len(tokens), random):
        drafts = tokens[at : at + part]
        assert constraint.allowed(drafts) == part
        assert np.array_equal(constraint.rows(drafts), rows[at : at + part + 1])
        constraint.forced(), constraint.expected()
        held = random.randint(0, part)  # the others were refused, so what comes next is drafted anew
        assert all(constraint.advance(token) == "" for token in drafts[:held])
        assert np.array_equal(constraint.rows([])[0], rows[at + held])
        if random.random() < 0.3:
            constraint = constraint.copy()
        assert all(constraint.advance(token) == "" for token in drafts[held:])
        at += part


@settings(deadline=None)
@given(st.sampled_from(STRUCTURES), st.randoms(use_true_random=False))
def test_what_is_forced_and_expected_may_follow(compiler, structure, random):
    constraint = compiler.compile(structure)
    walk(constraint, random, random.randint(0, 30), compiler.tokenizer.eos_token_ids)
    before = constraint.rows([])
    forced, (expected, chances) = constraint.forced(), constraint.expected()
    assert expected[: len(forced)] == forced
    assert len(chances) == len(expected)
    assert all(1 >= one >= other > 0 for one, other in pairwise(chances))
    assert constraint.allowed(expected) == len(expected)
    for row, token in zip(constraint.rows(forced), forced, strict=False):
        assert allowed(row).tolist() == [token]
    assert np.array_equal(constraint.rows([]), before)


@given(st.randoms(use_true_random=False))
def test_copies_do_not_see_one_another(compiler, random):
    constraint, ends = compiler.compile(STRUCTURES[2]), compiler.tokenizer.eos_token_ids
    walk(constraint, random, random.randint(0, 20), ends)
    other, before = constraint.copy(), constraint.rows([])
    walk(other, random, 20, ends)
    assert np.array_equal(constraint.rows([]), before)


def test_tokens_that_do_not_fit_are_not_allowed(compiler):
    constraint, encode = compiler.compile(STRUCTURES[3]), compiler.tokenizer.encode
    assert constraint.allowed(encode("word-", add_special_tokens=False)) == 5
    assert constraint.allowed(encode("worx", add_special_tokens=False)) == 3


def digits_taken(compiler, text, schema=True):
    """Return the number of digits allowed after a text."""
    constraint = compiler.compile(Schema(schema))
    assert all(constraint.advance(token) == "" for token in compiler.tokenizer.encode(text, add_special_tokens=False))
    (seven,) = compiler.tokenizer.encode("7", add_special_tokens=False)
    taken = 0
    while seven in allowed(constraint.rows([])[0]) and taken < 100:
        assert constraint.allowed([seven]) == 1
        assert constraint.advance(seven) == ""
        taken += 1
    assert taken == 100 or constraint.allowed([seven]) == 0
    return taken


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", MOST_DIGITS),
        ("-1", MOST_DIGITS - 1),
        ("[12, ", MOST_DIGITS),
        ('{"a1": ', MOST_DIGITS),
        ("0.", MOST_DIGITS),
        ("123.4", MOST_DIGITS - 1),
        ("1e", MOST_EXPONENT_DIGITS),
        ("1e-", MOST_EXPONENT_DIGITS),
        ('"', 100),
        ('"\\"', 100),
        ('{"a": "\\\\", "b": 1', MOST_DIGITS - 1),
    ],
)
def test_numbers_end(compiler, text, count):
    assert digits_taken(compiler, text) == count


def test_digits_that_nothing_can_replace_may_follow():
    limit = NumberLimit([b"7", b"1e", b"a", b""], 40)
    full = (0, MOST_DIGITS)
    for before, left in ([0b0011, 0b0011], [0b0111, 0b0100], [0b0100, 0b0100], [-1, ~0b0011]):
        bits = np.array([before, 0], np.int32)
        limit.apply(full, bits)
        assert bits.tolist() == [left, 0]
        assert not limit.allows(full, 0)
    limit.apply((0, MOST_DIGITS - 1), untouched := np.array([0b0111, 0], np.int32))
    assert untouched[0] == 0b0111


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 1.7976931348623157e308, 5e-324, 0.1 + 0.2, 1e21, 123456789.123456789])
@pytest.mark.parametrize("schema", [{"type": "number"}, {}])
def test_numbers_of_64_bits_fit(compiler, number, schema):
    if isinstance(number, float) or schema:
        tokens = compiler.tokenizer.encode(json.dumps(number), add_special_tokens=False)
        assert compiler.compile(Schema(schema)).allowed(tokens) == len(tokens)


def test_the_place_in_a_text_does_not_depend_on_how_it_is_cut(compiler):
    numbers = compiler.compile(Schema(True))._json.numbers
    tokens = compiler.tokenizer.encode('{"a\\"1": [12.5e-3, "\\\\", 7', add_special_tokens=False)
    place = BEGINNING
    for token in tokens:
        place = numbers.after(place, token)
    assert place == (0, 1)


def test_habits_foretell_punctuation(compiler):
    """After the first property it is known how this model puts a colon and the beginning of a text."""
    names = ["first", "second", "third"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    fresh = GrammarCompiler(compiler.tokenizer, VOCAB)
    constraint, text = fresh.compile(Schema(schema)), '{"first": "a", "second": "b", "'
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        constraint.expected()  # as the engine asks before each step
        assert constraint.advance(token) == ""
    tokens, chances = constraint.expected()
    assert compiler.tokenizer.decode(tokens) == 'third": "'
    assert chances[0] > chances[-1] > 0.3


def test_a_refusal_is_one_short_line(compiler):
    constraint = compiler.compile(Regex("(" + "word|" * 500 + "verb){1,9}"))
    (wrong,) = compiler.tokenizer.encode("z", add_special_tokens=False)
    reason = constraint.advance(wrong)
    assert "does not fit" in reason
    assert "\n" not in reason
    assert len(reason) < 400


@settings(deadline=None)
@given(st.sampled_from(STRUCTURES), st.randoms(use_true_random=False))
def test_drafts_that_end_the_answer_or_do_not_fit_change_nothing(compiler, structure, random):
    compiled, ends = compiler.compile(structure), compiler.tokenizer.eos_token_ids
    tokens, rows = walk(compiled.copy(), random, 20, ends)
    constraint = compiled.copy()
    for i, token in enumerate(tokens):
        wrong = random.choice([*ends, random.randrange(VOCAB)])
        drafts = [*tokens[i : i + random.randrange(4)], wrong, random.randrange(VOCAB)]
        assert np.array_equal(constraint.rows(drafts)[0], rows[i])
        assert not set(drafts[: constraint.allowed(drafts)]) & ends
        assert constraint.advance(token) == ""
    assert np.array_equal(constraint.rows([])[0], rows[-1])
