"""Constraints of several phases, token by token."""

from __future__ import annotations

import pytest
from support.tokenizers.byte_tokenizer import byte_tokenizer

from mlxinfer.output_format.format import HERMES, OutputFormat, ReasoningFormat
from mlxinfer.structure import Choice
from mlxinfer.structured_output.answer_constraint import AnswerRules
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tools import ToolChoice, offered

TOKENIZER = byte_tokenizer(("\n\n", "\n", "<think>", ">\n\n", ">x", "<tool_call>\n", "_call>\n", 'll>{"'))
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
END = min(TOKENIZER.eos_token_ids)
THINKING = OutputFormat(ReasoningFormat("<think>", "</think>"), HERMES, "described")
TOOLS = offered([{"name": "go", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}])
YES = Choice(["yes", "no"])


def tokens(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def held(*, budget=None, structure=None, begun="", choice=None):
    tools = TOOLS if choice else {}
    return AnswerRules(THINKING, tools, ToolChoice(choice or "none"), begun, structure, budget).constraint(COMPILER, TOKENIZER.vocab_size)


def follow(constraint, text):
    for token in tokens(text) if isinstance(text, str) else text:
        assert constraint.allowed([token]) == 1, TOKENIZER.token_text(token)
        assert not constraint.advance(token)
    return constraint


def may(constraint):
    """The tokens that may come; None for all."""
    rows = constraint.rows([])
    return None if rows is None else {i for i in range(TOKENIZER.vocab_size) if rows[0][i // 32] >> (i % 32) & 1}


def test_nothing_is_held_where_nothing_is_asked():
    assert held() is None
    assert held(structure=YES, begun="<think>\n\n</think>\n\n") is not None


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_is_forced_after_the_budget(budget):
    constraint = follow(held(budget=budget, begun="x<think>\n"), "abcde"[:budget])
    end = tokens("</think>")
    assert constraint.forced() == end
    for token in end:
        assert may(constraint) == {token}
        assert not constraint.advance(token)
    assert may(constraint) is None
    assert constraint.forced() == []


def test_what_is_there_of_the_end_is_not_written_again():
    constraint = follow(held(budget=5, begun="<think>"), tokens("ab</t"))
    assert TOKENIZER.decode(constraint.forced()) == "hink>"


def test_a_character_is_completed_first():
    constraint = follow(held(budget=2, begun="<think>"), [tokens("a")[0], *tokens("é")[:1]])
    assert may(constraint) is None
    constraint.advance(tokens("é")[1])
    assert TOKENIZER.decode(constraint.forced()) == "</think>"
    hopeless = follow(held(budget=1, begun="<think>"), tokens("𝄞")[:1] * 4)
    assert hopeless.forced(), "three tokens more, at most"


def test_the_model_may_begin_to_think_or_answer():
    think, answer = tokens("<think>"), tokens("yes")
    constraint = held(structure=YES)
    assert may(constraint) == {think[0], tokens("y")[0], tokens("n")[0]}
    follow(constraint.copy(), answer)
    thinking = follow(constraint.copy(), think)
    allowed = may(thinking)
    assert allowed is not None
    assert END not in allowed
    assert tokens("z")[0] in allowed
    answering = follow(thinking, "hm</think>\n\nyes")
    assert may(answering) == {END}


def test_an_answer_begins_with_a_token_of_its_own():
    """A token that ends the reasoning and begins the answer would escape what the answer is held to."""
    (runs_on,) = tokens(">x")
    (spaces,) = tokens(">\n\n")
    constraint = follow(held(structure=YES, begun="<think>"), tokens("a</think"))
    allowed = may(constraint)
    assert allowed is not None
    assert runs_on not in allowed
    assert spaces in allowed
    assert may(follow(constraint, [spaces])) == {tokens("y")[0], tokens("n")[0]}


def test_drafts_cross_phases():
    constraint = held(structure=YES, budget=3, begun="<think>")
    drafts = [*tokens("abc</think>"), *tokens("yes")]
    assert constraint.allowed(drafts) == len(drafts)
    rows = constraint.rows(drafts)
    assert rows is not None
    assert rows.shape[0] == len(drafts) + 1
    state = constraint.copy()
    for row, token in zip(rows, drafts, strict=False):
        own = state.rows([])
        assert own is not None
        assert (row == own[0]).all()
        assert not state.advance(token)
    assert constraint.allowed([*tokens("abcd")]) == 3
    assert may(constraint) == may(held(structure=YES, budget=3, begun="<think>")), "asking changes nothing"


@pytest.mark.parametrize("pieces", [["<tool_call>\n"], ["<tool", "_call>\n"], list("<tool_call>\n")])
def test_a_call_is_found_however_its_tokens_are_cut(pieces):
    constraint = follow(held(choice="auto", begun="<think></think>"), "Sure. ")
    for piece in pieces:
        follow(constraint, piece)
    assert may(constraint) == {tokens("{")[0]}
    follow(constraint, '{"name": "go", "arguments": {}}\n</tool_call>')
    assert may(constraint) is None


def test_what_goes_on_otherwise_is_text():
    constraint = held(choice="auto", begun="<think></think>")
    follow(constraint, [*tokens("<tool_ca"), *tokens('ll>{"')])
    assert may(constraint) is None, "the token was no beginning of the form, so it is free text"


def test_one_call_only():
    rules = AnswerRules(THINKING, TOOLS, ToolChoice("auto", parallel=False), "<think></think>", None, None)
    constraint = rules.constraint(COMPILER, TOKENIZER.vocab_size)
    assert constraint is not None
    follow(constraint, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>')
    assert may(constraint) == {END}


def test_calls_inside_the_reasoning_are_none():
    constraint = follow(held(choice="auto", begun="<think>"), "<tool_call>\nanything</think>\n\nWell")
    assert may(constraint) is None
    assert may(follow(constraint, "<tool_call>\n")) == {tokens("{")[0]}
