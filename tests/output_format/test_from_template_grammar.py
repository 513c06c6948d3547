"""Calls that chat templates render fit the grammars of calls; a changed letter of a name or key does not."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from templates import SHAPES

from mlxinfer.errors import MLXInferError
from mlxinfer.output_format.detect import derived
from mlxinfer.output_format.format import OutputFormat
from mlxinfer.structure import Schema
from mlxinfer.structured_output.answer_constraint import AnswerRules
from mlxinfer.structured_output.constraint import Constraint
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tools import Tool, ToolChoice
from tests.support.schemas.tool_chats import TOOLS, Call, TemplateOnly, calls_in, calls_message, random_calls, read, rendered_answer
from tests.support.tokenizers.byte_tokenizer import byte_tokenizer

REAL = os.environ.get("MLXINFER_TEST_TEMPLATES")
"""A directory of chat templates (`*.jinja`), such as llama.cpp's `models/templates`."""
TOKENIZER = byte_tokenizer()
END = min(TOKENIZER.eos_token_ids)
SCHEMA = next(iter(TOOLS.values())).parameters.schema
CLOSED = {name: Tool(name, "", Schema({**SCHEMA, "additionalProperties": False})) for name in TOOLS}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def ordered(calls: list[Call]) -> list[Call]:
    """Return the calls with arguments in the schema's order, which the JSON grammar requires."""
    return [(name, {key: arguments[key] for key in SCHEMA["properties"] if key in arguments}) for name, arguments in calls]


def accepted(constraint: Constraint, text: str) -> str:
    """Return the longest prefix of the text that is a whole answer."""
    constraint, longest, tokens = constraint.copy(), 0, TOKENIZER.encode(text, add_special_tokens=False)
    for at in range(len(tokens) + 1):
        rows = constraint.rows([])
        if rows is not None and rows[0][END // 32] >> (END % 32) & 1:
            longest = at
        if at == len(tokens) or constraint.advance(tokens[at]):
            break
    return TOKENIZER.decode(tokens[:longest])


def answer_of(format: OutputFormat, begun: str, rendered: str) -> str:
    """Return the model's part of a rendered message.

    The message's header and the ids of calls are removed; one empty line follows the reasoning.
    """
    assert format.calls is not None
    reasoning = (format.reasoning.begin, format.reasoning.end) if format.reasoning else ("", "")
    marks = [mark.strip() for mark in (format.calls.begin or "{", reasoning[0]) if mark]
    text = rendered.lstrip() if begun else rendered[min(rendered.index(mark) for mark in marks if mark in rendered) :]
    text = re.sub(r', "id": "call0000\d"|"tool_call_id": "\d", ', "", text)
    end = reasoning[1].strip()
    return re.sub(re.escape(end) + r"\s{3,}", end + "\n\n", text) if end else text


def check(compiler: GrammarCompiler, templates: TemplateOnly, format: OutputFormat, seed: str, count: int) -> None:
    """`count` random answers of calls are accepted as they are rendered, and not with another letter in a name or a key."""
    rng = random.Random(seed)
    assert format.calls is not None
    for number in range(count):
        several = format.calls.parallel and bool(format.calls.next or format.calls.call_begin)  # bare objects come one at a time
        calls = ordered(random_calls(rng, several and number != 0))
        begun, rendered = rendered_answer(templates, format, calls_message(calls))
        text = answer_of(format, begun, rendered)
        held = AnswerRules(format, CLOSED, ToolChoice("required"), begun, None, None).constraint(compiler, TOKENIZER.vocab_size)
        assert held is not None
        assert calls_in(read(format, accepted(held, text), begun=begun)) == calls, text
        name, arguments = calls[0]
        for word in (name, *arguments):
            start = text.index(word, text.index(name) + (word != name))
            place = start + rng.randrange(len(word))
            changed = text[:place] + ("y" if text[place] == "x" else "x") + text[place + 1 :]
            assert calls_in(read(format, accepted(held, changed), begun=begun)) == [], changed


@pytest.mark.long
@pytest.mark.parametrize("family", SHAPES)
def test_what_a_template_renders_may_be_written(compiler: GrammarCompiler, family: str) -> None:
    templates = TemplateOnly(SHAPES[family].template)
    check(compiler, templates, derived(templates, ends=["<|im_end|>"]), family, 4)


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="MLXINFER_TEST_TEMPLATES names no directory of chat templates")
def test_what_real_templates_render_may_be_written(compiler: GrammarCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    exact: list[str] = []
    failed: list[Any] = []
    for path in sorted(Path(REAL or "").glob("*.jinja")):
        templates = TemplateOnly(path.read_text(encoding="utf-8"))
        try:
            check(compiler, templates, derived(templates), path.stem, 10)
            exact.append(path.stem)
        except (AssertionError, MLXInferError, ValueError) as error:
            failed.append((path.stem, str(error)[:300]))
    with capsys.disabled():
        sys.stdout.write(f"{len(exact)} of {len(exact) + len(failed)} templates may be written exactly; not: {failed}\n")
    assert len(exact) >= 60
