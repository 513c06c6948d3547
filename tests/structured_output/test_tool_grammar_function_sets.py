"""Random walks through the grammars of real function sets produce valid calls."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from support.schemas.function_sets import FOLDER, MOST, function_sets
from support.tokenizers.byte_tokenizer import byte_tokenizer

from mlxinfer.output_format.format import OutputFormat
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.structured_output.tool_grammar import ToolGrammars
from mlxinfer.tools import Tools, offered

jsonschema = pytest.importorskip("jsonschema")

TOKENIZER = byte_tokenizer()
END = min(TOKENIZER.eos_token_ids)
_ENDS_SOON = {TOKENIZER.encode(character)[0] for character in "\"'}])<,1"}

OWN = [
    {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "maxLength": 8},
                "kind": {"enum": ["a", "b c"]},
                "limit": {"type": "integer", "minimum": 0, "maximum": 50},
                "where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
                "share": {"type": ["number", "null"]},
            },
            "required": ["text", "where"],
            "additionalProperties": False,
        },
    },
    {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]


def walk(constraint: Any, chance: random.Random, ends: list[list[int]], most: int = 1500) -> str | None:
    """A text that the grammar allows, mostly short; None if it does not end in time. `ends`: what ends a value, as tokens."""
    tokens: list[int] = []
    while len(tokens) < most:
        if ends and chance.random() < 0.3:
            end = chance.choice(ends)
            if constraint.allowed(end) == len(end):
                assert not any(constraint.advance(token) for token in end)
                tokens += end
                continue
        rows = constraint.rows([])
        allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size])
        soon = [token for token in allowed.tolist() if token in _ENDS_SOON or token == END]
        token = chance.choice(soon) if soon and chance.random() < 0.7 else int(chance.choice(allowed.tolist()))
        if token == END:
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
        assert not constraint.advance(token)
        tokens.append(token)
    return None


def check(family: str, tools: Tools, grammars: ToolGrammars, seed: int) -> bool:
    """Return True if a walk ended; the text then reads as one valid call."""
    calls = FAMILIES[family].calls
    constraint = grammars.compile(calls, tools, parallel=False).constraint.copy()
    ends = [TOKENIZER.encode(mark, add_special_tokens=False) for mark in (calls.value_end, calls.quote) if mark]
    text = walk(constraint, random.Random(seed), ends)
    if text is None:
        return False
    reader = OutputReader(OutputFormat(None, calls, "option"), tools)
    events = [*reader.add(text), *reader.finish()]
    names = [event.text for event in events if event.kind == "call_begin"]
    assert len(names) == 1, text
    arguments = "".join(event.text for event in events if event.kind == "arguments")
    jsonschema.validate(json.loads(arguments), tools[names[0]].parameters.schema)
    return True


@pytest.fixture(scope="module")
def grammars() -> ToolGrammars:
    return ToolGrammars(GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size))


@pytest.mark.parametrize("family", ["hermes", "mistral", "qwen3-coder", "glm", "gemma4", "pythonic"])
def test_what_a_grammar_allows_is_read_as_a_call_that_validates(grammars, family):
    tools = offered(OWN)
    assert sum(check(family, tools, grammars, seed) for seed in range(12)) >= 10


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="MLXINFER_TEST_BFCL names no folder of function sets")
@pytest.mark.parametrize("family", ["hermes", "mistral", "qwen3-coder", "glm", "gemma4", "pythonic"])
def test_real_function_sets(grammars, family):
    ended = [check(family, tools, grammars, seed) for seed, (_, tools) in enumerate(function_sets())]
    assert len(ended) == MOST
    assert sum(ended) > 0.9 * MOST
