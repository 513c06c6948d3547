"""Structures beyond the limits of time or stack are refused before compilation; others stay within the cost of a step."""

import json
import random
import re
import threading
from itertools import pairwise, permutations

import numpy as np
import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, Choice, Lark, Regex, SamplingParams, Schema
from mlxinfer.errors import SamplingError
from mlxinfer.structured_output import grammar
from mlxinfer.structured_output.grammar import Deadline, GrammarCompiler, TooLongError
from mlxinfer.structured_output.lark_limits import LONGEST_CHAIN, check_lark
from mlxinfer.structured_output.reference_chain import longest_chain
from mlxinfer.structured_output.schema_limits import MOST_OPTIONAL, MOST_PATTERN_PROPERTIES, MOST_PATTERNS, MOST_PROPERTIES
from mlxinfer.tokenizer.tokenizer import from_directory

AMBIGUOUS = Lark(
    'start: all "z"\nall: ' + " | ".join(f"r{i}" for i in range(80)) + "".join(f'\nr{i}: /x{{0,{i}}}/ "y" | r{i} r{i}' for i in range(80))
)
"""The number of matcher items grows with each character."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return GrammarCompiler(from_directory(tiny_directory(tmp_path_factory.mktemp("limits"), characters=JSON_CHARACTERS)), 96)


def optional(count):
    return {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(count)}}


def chain(count, step):
    return {"$ref": "#/$defs/0", "$defs": {f"{i}": step({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)} | {f"{count}": {}}}


SCHEMAS = {
    rf"at items: properties: {MOST_OPTIONAL + 1} of them may be left out": {"items": optional(MOST_OPTIONAL + 1)},
    rf"properties: there are {MOST_PROPERTIES + 1}": {"type": "object", "properties": {f"a{i}": {} for i in range(MOST_PROPERTIES + 1)}},
    r"properties: together": {"properties": {"a": optional(900), "b": {"items": optional(900)}}},
    r"anyOf: its parts have 8000 properties": {**optional(400), "anyOf": [{"required": [f"a{i}"]} for i in range(20)]},
    r"at properties\.b: properties: 1200 of them": {
        "properties": {"b": {"allOf": [optional(900), {"properties": {f"b{i}": {} for i in range(300)}}]}}
    },
    rf"patternProperties: there are {MOST_PATTERN_PROPERTIES + 1}": {
        "patternProperties": {f"^{i}$": {} for i in range(MOST_PATTERN_PROPERTIES + 1)}
    },
    rf"at items: allOf: it has {MOST_PATTERNS + 1} patterns": {
        "items": {"type": "string", "allOf": [{"pattern": f"^[a-z]*x{i}"} for i in range(MOST_PATTERNS + 1)]}
    },
    r"at properties\.a: multipleOf 30011: up to 10000": {"properties": {"a": {"multipleOf": 30011}}},
    r"\$ref: references lead 1\d\d\d levels deep": chain(600, lambda following: {"properties": {"a": following}}),
    r"\$ref: 3001 definitions": chain(3000, lambda following: {"allOf": [following]}),
    r"grammar size": {"anyOf": [{"type": "object", "required": [f"a{i}"]} for i in range(3500)]},
}


@pytest.mark.parametrize("told", SCHEMAS)
def test_schemas_that_take_too_long_are_refused_and_the_keyword_and_place_are_told(compiler, told):
    with pytest.raises(SamplingError, match=rf"structure: the schema cannot be held.*({told})"):
        compiler.compile(Schema(SCHEMAS[told]))


def doubling(name, count):
    return "\n".join([f"start: {name}0", *[f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(count)], f'{name}{count}: "a"'])


GRAMMARS = {
    r"terminal 'T0' is longer than \d+ characters": doubling("T", 40),
    r"rule 'start' leads 502 rules and brackets deep": "\n".join(["start: r0", *[f'r{i}: "a" r{i + 1}' for i in range(500)], 'r500: "a"']),
    r"terminal|rule 'start' leads 502": "\n".join(["start: T0", *[f'T{i}: "a" T{i + 1}' for i in range(500)], 'T500: "a"']),
    r"it has 9002 rules": "\n".join(["root ::= r0", *[f'r{i} ::= "a" r{i + 1}' for i in range(9000)], 'r9000 ::= "a"']),
    r"leads \d+ rules": "\n".join(["root ::= r0", *[f'r{i} ::= "a" r{i + 1} | r0' for i in range(1000)], 'r1000 ::= "a"']),
    r"multipleOf 30011": 'start: a\na: %json {"items": {"multipleOf": 30011}}',
    r"nested too deeply": "start: %json " + '{"items":' * 200 + "{}" + "}" * 200,
    r"grammar size": "start: "
    + " | ".join(f"r{i}" for i in range(1500))
    + "".join(f'\nr{i}: /x{{0,{i}}}/ "y" | r{i} r{i}' for i in range(1500)),
    r"Too many items": "start: "
    + " | ".join(f"r{i}" for i in range(400))
    + "".join(f'\nr{i}: /x{{0,{i}}}/ "y" | r{i} r{i}' for i in range(400)),
    r"there is no text that fits": "root ::= root",
}


@pytest.mark.parametrize("told", GRAMMARS)
def test_grammars_that_take_too_long_are_refused(compiler, told):
    with pytest.raises(SamplingError, match=rf"structure: .*({told})"):
        compiler.compile(Lark(GRAMMARS[told]))


def test_what_people_send_stays_within_the_limits(compiler):
    many = [f"{i * 7919 % 5000} option {i}" for i in range(5000)]
    constraint = compiler.compile(Choice(many))
    assert constraint.allowed(compiler.tokenizer.encode(many[1234], add_special_tokens=False)) == len(many[1234])
    rules = "\n".join(f'r{i}: "{i}" | "(" r{(i + 1) % 300} r{(i * 7) % 300} ")"' for i in range(300))
    compiler.compile(Lark("start: r0\n" + rules))
    compiler.compile(Schema(chain(150, lambda following: {"type": "object", "properties": {"next": following}, "required": ["next"]})))
    compiler.compile(Schema(optional(700)))
    node = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}, "additionalProperties": False}
    compiler.compile(Schema(node))
    compiler.compile(Lark(doubling("T", 12)))


@pytest.mark.parametrize(
    "structure",
    [Choice(["ab" * 5000]), Schema({"const": "ab" * 5000}), Lark(f'start: "{"ab" * 5000}"'), Regex("ab" * 5000)],
    ids=["choice", "schema", "lark", "regex"],
)
def test_long_texts_are_taken_token_by_token(compiler, structure):
    """Turned into tokens in every step, 200 KB would take 0.1 s of each."""
    constraint = compiler.compile(structure)
    (row,) = constraint.rows([])
    assert np.unpackbits(row.view(np.uint8)).sum() == 1
    assert constraint.forced() == []
    for _ in range(5):
        (row,) = constraint.rows([])
        assert not constraint.advance(int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]))


def test_an_expression_may_hold_slashes_and_line_breaks(compiler):
    for pattern, text in (("a/b\\/c", "a/b/c"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"), (r"[/]\\n", "/\\n")):
        constraint = compiler.compile(Regex(pattern))
        tokens = compiler.tokenizer.encode(text, add_special_tokens=False)
        assert constraint.allowed(tokens) == len(tokens), pattern
        assert not any(constraint.advance(token) for token in tokens)
        assert constraint.stopped


def walk_until_it_gives_up(constraint, tokens):
    for _ in range(200):
        constraint.rows([])
        if constraint.fault:
            return constraint.fault
        if fault := constraint.advance(next(tokens)):
            return fault
    return ""


def test_a_step_that_costs_too_much_is_a_fault_and_no_end(compiler):
    letters = iter(compiler.tokenizer.encode("xy" * 100, add_special_tokens=False))
    assert re.fullmatch(
        "structure: what may follow here takes too long to find out: .*( has 15\\d\\d items|Too many items).*",
        walk_until_it_gives_up(compiler.compile(AMBIGUOUS), letters),
    )


def test_only_the_request_that_costs_too_much_ends(tmp_path):
    with LLM(tiny_directory(tmp_path / "tiny", characters=JSON_CHARACTERS)) as llm:
        other = SamplingParams(temperature=0, max_tokens=60)
        alone = llm.generate(["abc"], other)[0].token_ids
        hostile = SamplingParams(
            temperature=1, seed=3, max_tokens=200, structure=AMBIGUOUS, logit_bias={llm.tokenizer.encode("z")[-1]: -100}
        )
        running = iter(llm.stream("abc", other))
        first = next(running)
        with pytest.raises(SamplingError, match=r"takes too long to find out: .*: the answer was ended"):
            llm.generate("abc", hostile)
        assert [*first.token_ids, *(token for chunk in running for token in chunk.token_ids)] == alone


def test_what_is_not_compiled_in_time_is_refused_and_does_not_pile_up(compiler, monkeypatch):
    deadline: Deadline[int] = Deadline(0.02, most_overdue=2)
    go_on = threading.Event()
    for _ in range(2):
        with pytest.raises(TooLongError):
            deadline.run(lambda: go_on.wait(30))
    with pytest.raises(TooLongError):
        deadline.run(lambda: 1)
    go_on.set()
    while any(thread.name == "mlxinfer-compile" for thread in threading.enumerate()):
        threading.Event().wait(0.001)
    assert deadline.run(lambda: 7) == 7
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with pytest.raises(RuntimeError, match="broke off"):
        deadline.run(lambda: 1 // 0)
    monkeypatch.setattr(compiler, "_deadline", Deadline(0.0, most_overdue=0))
    with pytest.raises(SamplingError, match="takes more than 3 s to compile, or others still do"):
        compiler.compile(Choice(["new"]))


def longest_path(references, weights):
    paths = (path for size in range(1, len(references) + 1) for path in permutations(references, size))
    return max(sum(map(weights.get, path)) for path in paths if all(b in references[a] for a, b in pairwise(path)))


def test_the_longest_chain():
    for seed in range(60):
        chance = random.Random(seed)
        names = "abcde"
        without_circles = seed % 2
        references = {a: {b for b in names if chance.random() < 0.4 and (b > a or not without_circles)} for a in chance.sample(names, 5)}
        weights = {name: chance.randint(1, 4) for name in names}
        found, first = longest_chain(references, weights)
        if without_circles:
            assert found == longest_path(references, weights)
        else:
            assert longest_path(references, weights) <= found <= sum(weights.values())
        assert first in names
    assert longest_chain({"a": ["elsewhere", "a"]}, {"a": 2}) == (2, "a")


def test_grammars_are_read_as_far_as_it_matters():
    text = 'start: a "b: c" /d: e/ // f: g\n   | T<[5]> p::set_bit(3)\na[lazy, max_tokens=3]: %json {"const": "x: y"} (("z"))'
    text += '\nT: "ü"\np::_: "" %if is_ones([0:2])'
    rules = check_lark(text).rules
    assert {name: sorted(rule.names) for name, rule in rules.items() if name in ("start", "a", "T")} == {
        "start": ["T", "a", "p"],
        "a": [],
        "T": [],
    }
    assert rules["a"].depth == 3
    assert check_lark(json.dumps("a" * 100)).text_size == 102
    assert check_lark("start: " + " ".join(f"r{i}" for i in range(LONGEST_CHAIN * 2))).rules["start"].depth == 1
    assert grammar.as_lark_regex("/") == r"\/"
