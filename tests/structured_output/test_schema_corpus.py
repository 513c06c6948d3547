"""Published schemas: invalid instances are never accepted, unsupported keywords are reported."""

import json
import re
from collections import Counter

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer.errors import SamplingError
from mlxinfer.loading.find.resolve import ALIASES
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.load import load_tokenizer
from mlxinfer.structure import Schema
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tokenizer.tokenizer import from_directory

pytest.importorskip("jsonschema")
schema_corpus = pytest.importorskip("support.schemas.corpus")

TOLD = r"structure: the schema cannot be held( at [^\n]+)?: [^\n]*(oneOf|uniqueItems|dependen|not|propertyNames|if|look-around)[^\n]*"
"""Return the path of the fault, if it is not the root, and the keyword."""


def accepts(compiler, compiled, text, *, masks):
    """Return True if the tokens of a text are allowed in sequence and the text may end there."""
    tokenizer, constraint = compiler.tokenizer, compiled.copy()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if constraint.allowed(tokens) < len(tokens):
        return False
    for token in tokens:
        if masks:
            (row,) = constraint.rows([])
            assert row[token // 32] >> (token % 32) & 1
        assert constraint.advance(token) == ""
    (row,) = constraint.rows([])
    return any(row[end // 32] >> (end % 32) & 1 for end in tokenizer.eos_token_ids)


def judge(compiler, cases, *, masks=False):
    """Return the number of schemas that compile and the verdicts on their instances."""
    found: Counter[str] = Counter()
    wrong: list[tuple[str, str]] = []
    for case in cases:
        found["schemas"] += 1
        try:
            constraint = compiler.compile(Schema(case.schema))
        except SamplingError as error:
            found["refused"] += 1
            found["refused and told why"] += bool(re.fullmatch(TOLD, str(error)))
            continue
        for name, values in (("valid", case.valid), ("invalid", case.invalid)):
            for value in values:
                found[name] += 1
                if accepts(compiler, constraint, json.dumps(value), masks=masks):
                    found[f"{name} accepted"] += 1
                    if name == "invalid":
                        wrong.append((json.dumps(case.schema), json.dumps(value)))
                elif name == "valid":
                    found[f"valid rejected: {case.kind}"] += 1
    return found, wrong


def check(found, wrong):
    assert not wrong
    assert found["refused"] <= 0.11 * found["schemas"]
    assert found["refused and told why"] == found["refused"]
    assert found["valid accepted"] >= 0.97 * found["valid"]


def test_a_sample_of_them(tmp_path):
    compiler = GrammarCompiler(from_directory(tiny_directory(tmp_path, characters=JSON_CHARACTERS)), 96)
    found, wrong = judge(compiler, schema_corpus.corpus(30, seed=1))
    check(found, wrong)
    assert found["invalid"] > 30


def test_the_same_seed_gives_the_same_schemas():
    first, second = (list(schema_corpus.corpus(12, seed=5)) for _ in range(2))
    assert first == second
    assert first != list(schema_corpus.corpus(12, seed=6))


@pytest.mark.slow
@pytest.mark.model(computes=False)
def test_all_of_them():
    compiler = GrammarCompiler(load_tokenizer(GGUFCheckpoint(ALIASES["smollm2"].find())), 49152)
    found, wrong = judge(compiler, schema_corpus.corpus(), masks=True)
    print(json.dumps(dict(sorted(found.items())), indent=1))  # noqa: T201
    check(found, wrong)
    assert found["schemas"] == sum(schema_corpus.SHARES.values()) > 1000
    assert found["refused"] > 0
