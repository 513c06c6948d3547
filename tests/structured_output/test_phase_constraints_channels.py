"""Answers in channels: the constraint starts after the channel's header."""

import json

import pytest
from support.tokenizers.byte_tokenizer import byte_tokenizer
from test_phase_constraints import TOOLS, follow

from mlxinfer.output_format.format import OutputFormat
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.structure import Choice, Schema
from mlxinfer.structured_output.answer_constraint import AnswerRules
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.structured_output.phase_constraints import has
from mlxinfer.tools import ToolChoice

WORDS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>", "assistant", "analysis", "final")
TOKENIZER = byte_tokenizer(WORDS)
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
END = min(TOKENIZER.eos_token_ids)
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
PROMPT = "hello<|end|><|start|>assistant"
"""The end of a prompt of gpt-oss: the user's message has ended there, not any reasoning."""
THOUGHTS = "<|channel|>analysis<|message|>so<|end|>"
HEADER = "<|start|>assistant<|channel|>final<|message|>"


def tokens(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def may(constraint):
    """The tokens that may come; None for all."""
    rows = constraint.rows([])
    return None if rows is None else {i for i in range(TOKENIZER.vocab_size) if has(rows[0], i)}


def held(family, *, structure, begun, budget=None, choice=None):
    form = FAMILIES[family]
    output_format = OutputFormat(form.reasoning, form.calls, "table", hidden=form.hidden, also=form.also, answer=form.answer)
    rules = AnswerRules(output_format, TOOLS if choice else {}, ToolChoice(choice or "none"), begun, structure, budget)
    constraint = rules.constraint(COMPILER, TOKENIZER.vocab_size)
    assert constraint is not None
    return constraint, output_format


def answer_of(output_format, text, tools=None, begun=PROMPT):
    reader = OutputReader(output_format, tools or {}, begun)
    return [(event.kind, event.text) for event in [*reader.add(text), *reader.finish()]]


def test_the_answer_comes_in_the_final_channel_after_the_reasoning():
    text = THOUGHTS + HEADER + '{"city": "Rome"}'
    constraint, output_format = held("harmony", structure=Schema(CITY), begun=PROMPT)
    follow(constraint, tokens(text))
    assert may(constraint) == {END}
    assert answer_of(output_format, text) == [("reasoning", "so"), ("content", '{"city": "Rome"}')]


def test_the_header_is_forced_and_what_the_prompt_has_of_it_is_not_written_again():
    constraint, _ = held("harmony", structure=Schema(CITY), begun=PROMPT)
    channel, analysis, final = (tokens(word)[0] for word in ("<|channel|>", "analysis", "final"))
    assert may(constraint) == {channel}
    follow(constraint, [channel])
    assert may(constraint) == {analysis, final}
    thinking = follow(constraint.copy(), tokens("analysis<|message|>so<|end|>"))
    assert thinking.forced() == tokens(HEADER)
    answering = follow(constraint, [final])
    assert answering.forced() == tokens("<|message|>")
    follow(answering, tokens('<|message|>{"city": "Paris"}'))
    assert may(answering) == {END}


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_leads_to_the_header(budget):
    constraint, _ = held("harmony", structure=Choice(["yes"]), begun=PROMPT, budget=budget)
    follow(constraint, tokens("<|channel|>analysis<|message|>" + "abc"[:budget]))
    assert constraint.forced() == tokens("<|end|>")
    follow(constraint, tokens("<|end|>" + HEADER + "yes"))
    assert may(constraint) == {END}


def test_drafts_may_run_from_the_reasoning_into_the_answer():
    constraint, _ = held("harmony", structure=Choice(["yes"]), begun=PROMPT)
    drafts = tokens(THOUGHTS + HEADER + "yes")
    assert constraint.allowed(drafts) == len(drafts)
    assert constraint.allowed([*drafts[:-1], tokens("x")[0]]) == len(drafts) - 1
    rows = constraint.rows(drafts)
    state = constraint.copy()
    for row, token in zip(rows, drafts, strict=False):
        own = state.rows([])
        assert own is None or (row == own[0]).all()
        assert not state.advance(token)
    assert state.expected()[0] == []


@pytest.mark.parametrize("thoughts", ["", THOUGHTS])
def test_with_tools_it_is_a_call_or_the_final_channel(thoughts):
    start = "<|start|>assistant" if thoughts else ""
    for text, found in (
        ("<|channel|>final<|message|>yes", [("content", "yes")]),
        (
            "<|channel|>commentary to=functions.go <|constrain|>json<|message|>{}<|call|>",
            [("call_begin", "go"), ("arguments", "{}"), ("call_end", "")],
        ),
    ):
        constraint, output_format = held("harmony", structure=Choice(["yes"]), begun=PROMPT, choice="auto")
        follow(constraint, tokens(thoughts + start + text))
        assert END in may(constraint)
        assert answer_of(output_format, thoughts + start + text, TOOLS) == [*([("reasoning", "so")] if thoughts else []), *found]
    free = tokens(start + "yes")
    assert follow(held("harmony", structure=Choice(["yes"]), begun=PROMPT, choice="auto")[0], tokens(thoughts)).allowed(free) < len(free)


def test_the_structure_may_be_a_choice_of_thousands():
    many = [f"{i * 7919 % 5000} option {i}" for i in range(5000)]
    constraint, _ = held("harmony", structure=Choice(many), begun=PROMPT, choice="auto")
    follow(constraint, tokens("<|channel|>final<|message|>" + many[4321]))
    assert END in may(constraint)


def test_a_prompt_may_have_begun_the_header():
    """Functionary's prompts end with ">>>", which calls begin with, too."""
    constraint, output_format = held("functionary", structure=Schema(CITY), begun=">>>")
    follow(constraint, tokens('all\n{"city": "Rome"}'))
    assert may(constraint) == {END}
    found = answer_of(output_format, 'all\n{"city": "Rome"}', begun=">>>")
    assert [json.loads(text) for kind, text in found if kind == "content"] == [{"city": "Rome"}]
    either, _ = held("functionary", structure=Schema(CITY), begun=">>>", choice="auto")
    follow(either.copy(), tokens("go\n{}"))
    follow(either, tokens('all\n{"city": "Rome"}'))


def test_without_a_structure_nothing_is_written_before_the_answer():
    constraint, _ = held("harmony", structure=None, begun=PROMPT, budget=2)
    follow(constraint, tokens("<|channel|>analysis<|message|>ab<|end|>Anything"))
    assert may(constraint) is None
