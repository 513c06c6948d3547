"""Chats with tools and reasoning, with a tiny random model."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, SamplingParams, Schema
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.request_keywords import RequestOptions
from mlxinfer.errors import PromptError, SamplingError, SettingError
from mlxinfer.structure import Lark
from mlxinfer.tools import offered

jsonschema = pytest.importorskip("jsonschema")

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}'
    "{% if add_generation_prompt %}[assistant]{% if thinks %}<think>\n{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
THINKS = {"thinks": True}
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


def turn_on(room: Literal["hall", "attic"], level: int = 3) -> str:
    """Turn a light on."""
    return f"{room} {level}"


def off() -> str:
    """Turn all off."""
    return "off"


TOOLS = offered([turn_on, off])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", "qwen3", characters=JSON_CHARACTERS, context=4096)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path) as llm:
        yield llm


def sampled(seed=0, **params):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 300} | params)


def check_calls(completion, tools=TOOLS):
    for call in completion.tool_calls:
        jsonschema.validate(json.loads(call.arguments), tools[call.name].parameters.schema)


def thought(llm, completion):
    """The tokens of the reasoning, which is as long as its text here."""
    text = llm.tokenizer.decode(completion.token_ids)
    return text.index("</think>") if "</think>" in text else len(completion.token_ids)


@pytest.mark.long
@pytest.mark.parametrize("budget", [0, 1, 50])
@pytest.mark.parametrize("structure", [None, Schema(ANSWER)])
def test_a_thinking_budget_holds(llm, budget, structure):
    for seed in range(3):
        params = sampled(seed, thinking_token_budget=budget, structure=structure, max_tokens=150)
        found = llm.chat(HELLO, params, template_vars=THINKS)
        assert thought(llm, found) <= budget
        assert len(found.reasoning or "") <= budget
        if structure is not None:
            assert found.finish_reason == "stop"
            jsonschema.validate(json.loads(found.text), ANSWER)


def test_a_model_may_open_the_reasoning_itself(llm):
    """A constrained answer may start its reasoning, unless the prompt did."""
    bias = {llm.tokenizer.encode(character)[0]: 30.0 for character in "<think>"}
    params = SamplingParams(temperature=0.0, thinking_token_budget=20, structure=Schema(ANSWER), max_tokens=200, logit_bias=bias)
    found = llm.chat(HELLO, params)
    text = llm.tokenizer.decode(found.token_ids)
    assert text.startswith("<think>")
    assert found.reasoning is not None
    assert len(found.reasoning) <= 20
    jsonschema.validate(json.loads(found.text), ANSWER)


def test_required_calls_after_reasoning(llm):
    for seed in range(4):
        params = sampled(seed, thinking_token_budget=20)
        found = llm.chat(HELLO, params, tools=[turn_on, off], tool_choice="required", parallel_tool_calls=False, template_vars=THINKS)
        assert found.finish_reason == "stop"
        assert len(found.tool_calls) == 1
        assert not found.text
        check_calls(found)


def test_thinking_that_never_ends_is_delivered(llm):
    found = llm.chat(HELLO, sampled(max_tokens=60), tools=[off], tool_choice="required", template_vars=THINKS)
    assert found.finish_reason == "length"
    assert not found.tool_calls
    assert not found.text
    assert found.reasoning is not None
    assert found.reasoning.strip() == llm.tokenizer.decode(found.token_ids).strip()


def test_a_call_that_breaks_off_is_delivered(llm):
    ask = {"tools": [turn_on], "tool_choice": "required", "parallel_tool_calls": False, "template_vars": THINKS}
    whole = llm.chat(HELLO, sampled(3, thinking_token_budget=0), **ask)
    cut = llm.chat(HELLO, sampled(3, thinking_token_budget=0, max_tokens=len(whole.token_ids) - 18), **ask)
    assert cut.finish_reason == "length"
    assert [call.name for call in cut.tool_calls] == ["turn_on"]
    assert cut.tool_calls[0].arguments
    assert whole.tool_calls[0].arguments.startswith(cut.tool_calls[0].arguments)
    early = llm.chat(HELLO, sampled(3, thinking_token_budget=0, max_tokens=22), **ask)
    assert early.text
    assert not early.tool_calls
    assert llm.tokenizer.decode(early.token_ids).endswith(early.text)


def test_a_named_tool_alone_may_be_called(llm):
    for seed in range(3):
        params = sampled(seed, thinking_token_budget=5)
        found = llm.chat(HELLO, params, tools=[turn_on, off], tool_choice="turn_on", parallel_tool_calls=False)
        assert [call.name for call in found.tool_calls] == ["turn_on"]
        check_calls(found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_free_text_is_not_disturbed(llm, temperature, monkeypatch):
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=80)
    offering = llm.chat(HELLO, params, tools=[turn_on])
    monkeypatch.setattr("mlxinfer.structured_output.answer_constraint.AnswerRules.constraint", lambda *_: None)
    assert llm.chat(HELLO, params, tools=[turn_on]).token_ids == offering.token_ids


def held_in_text(llm, text, tools=TOOLS):
    """Possible continuations of a text with an open call."""
    prompt = llm.chat_prompt(HELLO, tools=list(tools.values()))
    (sequence,) = llm._client.opened.inputs.sequences(prompt, None, RequestOptions())
    constraint = sequence.constraint
    for token in llm.tokenizer.encode(text):
        assert not constraint.advance(token)
    rows = constraint.rows([])
    return None if rows is None else "".join(c for i, c in enumerate(JSON_CHARACTERS) if len(c) == 1 and rows[0][i // 32] >> (i % 32) & 1)


def test_a_call_that_begins_in_free_text_is_held_to_the_tools(llm):
    begun = 'Well. <tool_call>\n{"name": "'
    assert held_in_text(llm, "Well. <tool_cal") is None
    assert held_in_text(llm, begun) == "ot"
    assert held_in_text(llm, begun + 'off", "arguments": {}}') == "\n"
    assert held_in_text(llm, begun + 'off", "arguments": {}}\n</tool_call>') is None
    assert held_in_text(llm, begun + 'off", "arguments": {}}\n</tool_call>\nAnd <tool_call>') == "\n"


@pytest.mark.long
def test_together_it_is_what_it_is_alone_and_without_drafts(llm, path):
    prompts = [
        llm.chat_prompt(HELLO, tools=[turn_on, off], tool_choice="required", template_vars=THINKS),
        llm.chat_prompt(HELLO, tools=[turn_on], tool_choice="turn_on"),
        llm.chat_prompt(HELLO, tools=[turn_on, off]),
    ]
    params = [sampled(1, n=2, thinking_token_budget=9), sampled(2, logprobs=1), sampled(3, max_tokens=50)]
    together = llm.generate(prompts, params)
    alone = [answer for prompt, each in zip(prompts, params, strict=True) for answer in llm.generate(prompt, each)]
    with LLM(path, speculate=False, prefix_cache=False) as plain:
        undrafted = plain.generate(prompts, params)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone] == [a.token_ids for a in undrafted]
    assert [a.tool_calls for a in together] == [a.tool_calls for a in alone]
    assert sum(a.usage.stats.accepted_tokens for a in together) > 20


def test_preempted_answers_are_the_same(llm, path):
    prompts = [llm.chat_prompt(HELLO, tools=[turn_on, off], tool_choice="required", template_vars=THINKS)] * 2
    params = [sampled(seed, thinking_token_budget=9) for seed in (1, 2)]
    expected = llm.generate(prompts, params)
    with LLM(path, speculate=False) as other:
        scheduler = other.engine.scheduler
        schedule, calls = scheduler.schedule, []

        def with_preemptions():
            calls.append(1)
            return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (12, 40) and scheduler.running else schedule()

        scheduler.schedule = with_preemptions
        found = other.generate(prompts, params)
    assert sum(a.usage.stats.preemptions for a in found) > 0
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


def test_pieces_make_up_the_whole(llm):
    ask = {"tools": [turn_on, off], "tool_choice": "required", "template_vars": THINKS}
    params = sampled(5, thinking_token_budget=12)
    whole = llm.chat(HELLO, params, **ask)
    chunks = list(llm.stream_chat(HELLO, params, **ask))
    assert "".join(chunk.reasoning for chunk in chunks) == (whole.reasoning or "")
    assert "".join(chunk.text for chunk in chunks) == whole.text
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    first = [delta for delta in deltas if delta.name is not None]
    assert [(delta.id, delta.name) for delta in first] == [(call.id, call.name) for call in whole.tool_calls]
    for index, call in enumerate(whole.tool_calls):
        assert "".join(delta.arguments for delta in deltas if delta.index == index) == call.arguments
    assert len({call.id for call in whole.tool_calls}) == len(whole.tool_calls)


def test_what_cannot_be_combined_or_offered_is_refused(llm):
    for ask, words in (
        ({"tools": [off], "tool_choice": "on"}, "no tool is called 'on'"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [off, off]}, "two tools called 'off'"),
        ({"tools": [3]}, r"tools\[0\] must be a function"),
    ):
        with pytest.raises(PromptError, match=words):
            llm.chat(HELLO, **ask)
    with pytest.raises(SamplingError, match="cannot be combined with tools"):
        llm.chat(HELLO, SamplingParams(structure=Lark('start: "a"')), tools=[off])
    with pytest.raises(SamplingError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1)


def test_a_form_of_calls_can_be_named(path):
    with pytest.raises(SettingError, match="unknown tool format 'nope': use one of "):
        LLM(path, tool_format="nope")
    with LLM(path, tool_format="qwen3-coder") as other:
        ask = {"tools": [turn_on], "tool_choice": "required", "parallel_tool_calls": False, "template_vars": THINKS}
        found = other.chat(HELLO, sampled(1, thinking_token_budget=0), **ask)
        assert "<function=turn_on>" in other.tokenizer.decode(found.token_ids)
        assert found.finish_reason == "stop"
        check_calls(found)


def test_tools_or_a_structure(llm):
    for seed in range(4):
        found = llm.chat(
            HELLO, sampled(seed, structure=Schema(ANSWER), thinking_token_budget=5), tools=[turn_on], parallel_tool_calls=False
        )
        assert found.finish_reason == "stop"
        check_calls(found)
        if not found.tool_calls:
            jsonschema.validate(json.loads(found.text), ANSWER)


def test_stop_strings_end_content_only(llm):
    params = sampled(1, thinking_token_budget=30, stop=["e", "a", "o"])
    found = llm.chat(HELLO, params, tools=[turn_on], tool_choice="required", parallel_tool_calls=False, template_vars=THINKS)
    assert found.finish_reason == "stop"
    assert found.stop_string is None
    assert len(found.tool_calls) == 1


def test_ids_of_calls_differ_from_turn_to_turn(llm):
    """With one seed for all turns too, and they are the same again for the same request."""
    ask = {"tools": [off], "tool_choice": "required", "parallel_tool_calls": False, "template_vars": THINKS}
    longer = [*HELLO, {"role": "assistant", "content": "Yes?"}, *HELLO]
    params = sampled(5, thinking_token_budget=5)
    first, again, later = (llm.chat(messages, params, **ask).tool_calls[0].id for messages in (HELLO, HELLO, longer))
    assert first == again
    assert first != later
