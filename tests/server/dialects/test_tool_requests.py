"""Tools, choices, conversations and reasoning settings in each dialect, in the form that the engine gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from mlxinfer.errors import PromptError
from mlxinfer.server.anthropic.blocks import for_template as of_messages
from mlxinfer.server.anthropic.protocol import ConversationRequest
from mlxinfer.server.anthropic.tools import offer_of as offer_of_messages
from mlxinfer.server.errors import APIError, from_validation_error
from mlxinfer.server.ollama.generate import OllamaChatRequest
from mlxinfer.server.ollama.messages import for_template as of_ollama
from mlxinfer.server.openai.chat import ChatRequest
from mlxinfer.server.openai.messages import for_template as of_chat
from mlxinfer.server.openai.response_items import offer_of as offer_of_response
from mlxinfer.server.openai.responses import ResponseRequest
from mlxinfer.server.shared.reasoning import Thinking
from mlxinfer.server.shared.tools import Offer, schema_refused
from mlxinfer.tools import ToolChoice
from mlxinfer.types import SamplingParams

HI: Any = [{"role": "user", "content": "Hi"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "clock")]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDES: Any = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "clock")]
NAMED: Any = {"type": "function", "function": {"name": "clock"}}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def chat(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HI, **more})


def response(**more: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"model": "m", "input": "Hi", **more})


def message(**more: Any) -> ConversationRequest:
    return ConversationRequest.model_validate({"model": "m", "messages": HI, **more})


def names(offer: Offer) -> list[str]:
    return [tool.name for tool in offer.tools]


def fault(made: Any) -> APIError:
    """The error of a request, from validation or from the handler."""
    try:
        made()
    except ValidationError as error:
        return from_validation_error(error)
    except APIError as error:
        return error
    raise AssertionError("nothing is wrong")


# --- tools and choices


@pytest.mark.parametrize(
    ("given", "choice", "offered"),
    [
        ({}, ToolChoice("auto"), ["weather", "clock"]),
        ({"tool_choice": "none"}, ToolChoice("none"), ["weather", "clock"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolChoice("required", None, False), ["weather", "clock"]),
        ({"tool_choice": NAMED}, ToolChoice("required", "clock", False), ["weather", "clock"]),
        ({"tool_choice": NAMED, "parallel_tool_calls": True}, ToolChoice("required", "clock", True), ["weather", "clock"]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            ToolChoice("required"),
            ["clock"],
        ),
    ],
)
def test_choices_of_chat(given: Any, choice: ToolChoice, offered: list[str]) -> None:
    found = chat(tools=TOOLS, **given).offer()
    assert (found.choice, names(found)) == (choice, offered)


def test_choices_of_older_chat() -> None:
    functions = [tool["function"] for tool in TOOLS]
    assert chat(functions=functions, function_call={"name": "clock"}).offer().choice == ToolChoice("required", "clock", False)
    assert chat(functions=functions).offer().choice == ToolChoice("auto", None, False)
    assert chat(functions=functions).has_older_form
    assert not chat(tools=TOOLS).has_older_form


def test_choices_of_responses() -> None:
    def offer(**more: Any) -> Offer:
        body = response(**more)
        return offer_of_response(body.tools or (), body.tool_choice, body.parallel_tool_calls)

    kinds = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, {"type": "local_shell"}]
    assert names(offer(tools=[*kinds, *FLAT])) == ["weather", "clock"]
    assert offer(tools=kinds).tools == ()
    assert offer(tools=FLAT, tool_choice={"type": "function", "name": "clock"}).choice == ToolChoice("required", "clock", False)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
    assert names(offer(tools=FLAT, tool_choice=allowed)) == ["clock"]
    assert fault(lambda: offer(tools=kinds, tool_choice="required")).param == "tool_choice"
    assert fault(lambda: offer(tools=[{"type": "file_search"}])).param == "tools[0].type"


def test_tools_that_are_left_out_are_noted() -> None:
    noted: dict[str, str] = {}
    body = {"model": "m", "input": "Hi", "tools": [*FLAT, {"type": "web_search", "filters": {}}]}
    ResponseRequest.model_validate(body, context=noted)
    assert list(noted) == ["tools[].type"]


def test_choices_of_messages() -> None:
    def choice(**given: Any) -> ToolChoice:
        body = message(tools=CLAUDES, tool_choice=given)
        return offer_of_messages(body.tools or (), body.tool_choice).choice

    assert choice(type="auto", disable_parallel_tool_use=True) == ToolChoice("auto", None, False)
    assert choice(type="any") == ToolChoice("required")
    assert choice(type="tool", name="clock") == ToolChoice("required", "clock", False)
    assert choice(type="none") == ToolChoice("none")
    assert fault(lambda: choice(type="tool")).param == "tool_choice.name"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 2**18}}}]}, "tools[0].function"),
        ({"tools": TOOLS, "functions": [{"name": "a"}]}, "functions"),
        ({"tools": [1]}, "tools[0]"),
    ],
)
def test_wrong_tools_are_named(given: Any, param: str) -> None:
    error = fault(lambda: chat(**given).offer())
    assert (error.status, error.param) == (400, param)


def test_a_strict_schema_that_cannot_be_held_is_named_by_its_place() -> None:
    error = schema_refused(PromptError("tools: clock: its schema cannot be held, which strict asks for: not"), ["weather", "clock"])
    assert (error.status, error.param) == (400, "tools[1]")
    assert "clock" in error.message


# --- conversations


def test_chat_messages() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "Hm."}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "21"}]}
    _, plain, told = of_chat(chat(messages=[*HI, answer, result]).messages)
    assert plain == {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    assert told == {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "21"}


def test_arguments_that_are_no_json_stay_text() -> None:
    broken = {**CALL, "function": {"name": "weather", "arguments": '{"city": '}}
    (plain,) = of_chat(chat(messages=[{"role": "assistant", "content": "", "tool_calls": [broken]}]).messages)
    assert plain["tool_calls"][0]["function"]["arguments"] == '{"city": '


def test_older_chat_messages() -> None:
    answer = {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": "{}"}}
    _, plain, told = of_chat(chat(messages=[*HI, answer, {"role": "function", "name": "clock", "content": "noon"}]).messages)
    assert told["tool_call_id"] == plain["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "tool_call_id": "call_2", "content": "21"}], "messages[1].tool_call_id"),
        ([{"role": "tool", "content": "21"}], "messages[1].tool_call_id"),
        ([{"role": "function", "name": "clock", "content": "noon"}], "messages[1].name"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[1]"),
        ([{"role": "user", "content": "x", "reasoning": "Hm."}], "messages[1]"),
        ([{"role": "assistant", "content": None}], "messages[1].content"),
    ],
)
def test_wrong_chat_messages_are_named(messages: Any, param: str) -> None:
    assert fault(lambda: of_chat(chat(messages=[*HI, *messages]).messages)).param == param


def test_response_items_of_one_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": None,
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "21"}]},
        {"type": "message", "role": "assistant", "content": "21."},
    ]
    _, turn, told, last = response(input=items, instructions=None).messages()
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("Hm.", "I look.", 1)
    assert told == {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "21"}
    assert last == {"role": "assistant", "content": "21."}
    orphan = {"type": "function_call_output", "call_id": "call_9", "output": "21"}
    assert fault(lambda: response(input=[orphan]).messages()).param == "input[0].call_id"


def test_blocks_of_tools() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    results = [
        {"type": "text", "text": "Well?"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "not there", "is_error": True},
    ]
    turns = [*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, use]}, {"role": "user", "content": results}]
    _, called, told, asked = of_messages(None, message(messages=turns).messages)
    assert called["reasoning_content"] == "Hm."
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert told == {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "Error: not there"}
    assert asked == {"role": "user", "content": "Well?"}
    lost = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2"}]}]
    assert fault(lambda: of_messages(None, message(messages=lost).messages)).param == "messages[0].content[0].tool_use_id"
    assert (
        fault(lambda: of_messages(None, message(messages=[{"role": "user", "content": [use]}]).messages)).param == "messages[0].content[0]"
    )


def test_results_of_ollama_find_their_calls() -> None:
    asked = [{"function": {"name": name, "arguments": {}}} for name in ("weather", "clock")]
    results = [{"role": "tool", "tool_name": "clock", "content": "noon"}, {"role": "tool", "content": "21"}]
    body = OllamaChatRequest.model_validate({"model": "m", "messages": [*HI, {"role": "assistant", "tool_calls": asked}, *results]})
    _, turn, clock, weather = of_ollama(body.messages or [])
    ids = [call["id"] for call in turn["tool_calls"]]
    assert [(clock["name"], clock["tool_call_id"]), (weather["name"], weather["tool_call_id"])] == [("clock", ids[1]), ("weather", ids[0])]


# --- thinking


def model(variables: set[str], template: str = "", *, thinks: bool = True) -> tuple[Any, Any]:
    tokenizer = SimpleNamespace(template_variables=frozenset(variables), chat_template=template)
    prompt = SimpleNamespace(format=SimpleNamespace(reasoning="<think>" if thinks else None))
    return SimpleNamespace(llm=SimpleNamespace(tokenizer=tokenizer, max_context=1000)), prompt


@pytest.mark.parametrize(
    ("effort", "known", "template", "variables", "budget"),
    [
        ("none", {"enable_thinking"}, "", {"enable_thinking": False}, None),
        ("none", {"thinking"}, "", {"thinking": False}, None),
        ("none", set(), "", {}, 0),
        ("low", {"enable_thinking"}, "", {"enable_thinking": True}, 20),
        ("minimal", set(), "", {}, 10),
        ("high", {"reasoning_effort"}, "", {"reasoning_effort": "high"}, None),
        ("xhigh", {"reasoning_effort"}, "", {"reasoning_effort": "high"}, None),
        ("max", {"reasoning_effort"}, "{% if reasoning_effort == 'max' %}", {"reasoning_effort": "max"}, None),
        ("max", set(), "", {}, None),
    ],
)
def test_efforts(effort: Any, known: set[str], template: str, variables: Any, budget: int | None) -> None:
    served, prompt = model(known, template)
    thinking = chat(reasoning_effort=effort).thinking()
    assert thinking.variables(served) == variables
    assert thinking.held(SamplingParams(max_tokens=100), served, prompt).thinking_token_budget == budget
    plain = model(known, template, thinks=False)
    assert thinking.held(SamplingParams(max_tokens=100), *plain).thinking_token_budget is None


def test_a_number_goes_before_an_effort_and_without_a_limit_the_context_counts() -> None:
    served, prompt = model(set())
    assert (
        chat(reasoning_effort="low", thinking_token_budget=7).thinking().held(SamplingParams(), served, prompt).thinking_token_budget == 7
    )
    assert chat(reasoning_effort="low").thinking().held(SamplingParams(max_tokens=None), served, prompt).thinking_token_budget == 200


def test_other_servers_words_for_thinking() -> None:
    assert chat(reasoning={"effort": "low", "max_tokens": 9}).thinking() == Thinking(None, "low", 9)
    assert chat(reasoning={"enabled": False}).thinking() == Thinking(on=False)
    assert chat(thinking_budget_tokens=4).thinking() == Thinking(budget=4)
    assert chat(thinking_budget_tokens=-1, reasoning={"max_tokens": 9}).thinking() == Thinking()
    assert chat(reasoning_budget_tokens=0).thinking() == Thinking(budget=0)
    settings: Any = SimpleNamespace(reasoning_field="both")
    assert chat(reasoning={"exclude": True}).reasoning_field(settings) == "none"
    assert chat(include_reasoning=False).reasoning_field(settings) == "none"
    assert chat(include_reasoning=True).reasoning_field(settings) == "both"


def test_variables_that_the_template_does_not_read_stay_outside() -> None:
    body = chat(chat_template_kwargs={"enable_thinking": True, "preserve_thinking": True, "reasoning_effort": "own"})
    served, _ = model({"enable_thinking", "reasoning_effort", "messages"})
    assert body.thinking().variables(served, body.given_variables) == {"enable_thinking": True, "reasoning_effort": "own"}
    assert fault(lambda: chat(chat_template_kwargs={"tokenize": False})).param == "chat_template_kwargs.tokenize"
    assert fault(lambda: chat(chat_template_kwargs={"messages": []})).param == "chat_template_kwargs.messages"


def test_thinking_of_messages() -> None:
    served, prompt = model({"enable_thinking"})
    fixed, _ = model(set())

    def thinking(**more: Any) -> Thinking:
        return message(**more).wanted_thinking()

    def budget(found: Thinking, of: Any) -> int | None:
        return found.held(SamplingParams(max_tokens=100), of, prompt).thinking_token_budget

    enabled = thinking(thinking={"type": "enabled", "budget_tokens": 50})
    assert (enabled.variables(served), budget(enabled, served)) == ({"enable_thinking": True}, 50)
    off = thinking(thinking={"type": "disabled"})
    assert (off.variables(served), budget(off, served), budget(off, fixed)) == ({"enable_thinking": False}, None, 0)
    adaptive = thinking(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert (adaptive.variables(served), budget(adaptive, served)) == ({"enable_thinking": True}, 20)
    silent = thinking(output_config={"effort": "low"})
    assert (silent.variables(served), budget(silent, fixed)) == ({"enable_thinking": False}, None)
    assert fault(lambda: thinking(thinking={"type": "enabled"})).param == "thinking.budget_tokens"
