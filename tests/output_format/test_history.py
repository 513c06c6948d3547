"""Earlier calls, results and reasoning as chat templates take them, and tools for templates that know none."""

from __future__ import annotations

import json
from typing import Any

from templates import NO_TOOLS, SHAPES

from mlxinfer.output_format import OutputFormat, messages_for_template
from mlxinfer.output_format.detect import derived
from mlxinfer.output_format.format import HERMES
from tests.support.schemas.tool_chats import TOOLS, TemplateOnly, calls_message

KNOWS_ALL = OutputFormat(None, HERMES, "chat template")
KNOWS_NOTHING = OutputFormat(None, HERMES, "described", tools_in_template=False, calls_in_template=False, results_in_template=False)
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "22 degrees"}


def test_arguments_reach_templates_as_objects() -> None:
    messages, tools = messages_for_template(KNOWS_ALL, [USER, calls_message([("get", {"city": "x"})]), RESULT], TOOLS)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "get", "arguments": {"city": "x"}}
    assert messages[2] == {**RESULT, "name": "get"}
    assert tools == [tool.as_openai() for tool in TOOLS.values()]


def test_arguments_reach_templates_as_text_where_they_want_it() -> None:
    format = OutputFormat(None, HERMES, "chat template", arguments_as_text=True)
    messages, _ = messages_for_template(format, [calls_message([("get", {"city": "x"})])], TOOLS)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"city": "x"}'


def test_text_only_templates_are_found_out() -> None:
    source = SHAPES["functionary"].template.replace("(c.arguments | tojson)", "c.arguments")
    format = derived(TemplateOnly(source))
    assert format.arguments_as_text
    assert format.source == "chat template"


def test_ids_are_made_short_for_templates_that_want_them_so() -> None:
    check = "{%- if t.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{%- endif %}"
    source = SHAPES["mistral"].template.replace("{%- set c =", check + "{%- set c =")
    source = source.replace("{%- else %}{{- m.content", "{%- else %}{{- '<' + (m.tool_call_id or '') + '>' + m.content")
    format = derived(TemplateOnly(source))
    assert format.short_ids
    assert not derived(TemplateOnly(SHAPES["mistral"].template)).short_ids
    answer = calls_message([("get", {"city": "x"})])
    answer["tool_calls"][0]["id"] = given = "call_" + "0123456789abcdef" * 2
    messages, tools = messages_for_template(format, [USER, answer, {**RESULT, "tool_call_id": given}], TOOLS)
    short = messages[1]["tool_calls"][0]["id"]
    assert (len(short), messages[2]["tool_call_id"], messages[2]["name"]) == (9, short, "get")
    assert f"<{short}>22 degrees" in TemplateOnly(source).render_chat(messages, tools=tools)


def test_arguments_that_are_no_object_are_kept() -> None:
    for arguments, expected in (
        ('{"city": "Lon', {"arguments": '{"city": "Lon'}),
        ("[1]", {"arguments": [1]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
    ):
        call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": arguments}}]}
        messages, _ = messages_for_template(KNOWS_ALL, [call], TOOLS)
        assert messages[0]["tool_calls"][0]["function"]["arguments"] == expected


def test_reasoning_is_handed_back_under_all_names() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages, _ = messages_for_template(KNOWS_ALL, [{"role": "assistant", "content": "x", name: "hm"}], {})
        assert messages == [{"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm"}]


def test_the_messages_given_are_not_changed() -> None:
    given = [USER, {**calls_message([("get", {})]), "reasoning": "hm"}, RESULT, RESULT]
    before = json.dumps(given)
    for format in (KNOWS_ALL, KNOWS_NOTHING):
        messages_for_template(format, given, TOOLS)
        assert json.dumps(given) == before


def test_templates_without_tools_get_everything_as_text() -> None:
    given = [{"role": "system", "content": "Be brief."}, USER, calls_message([("get", {"city": "x"})], "Let me see."), RESULT, RESULT]
    messages, tools = messages_for_template(KNOWS_NOTHING, given, TOOLS)
    assert tools is None
    system, user, answer, result = messages
    assert system["content"].startswith("Be brief.\n\n# Tools")
    assert all(json.dumps(tool.as_openai(), ensure_ascii=False) in system["content"] for tool in TOOLS.values())
    assert user == USER
    assert answer == {
        "role": "assistant",
        "content": 'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"city": "x"}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "\n".join(["<tool_response>\n22 degrees\n</tool_response>"] * 2)}


def test_templates_without_a_system_message_get_the_description_with_the_first_question() -> None:
    source = NO_TOOLS.replace("{{- '<|im_start|>'", "{%- if m.role == 'system' %}{{ raise_exception('no') }}{%- endif %}{{- '<|im_start|>'")
    format = derived(TemplateOnly(source))
    assert not format.system_in_template
    messages, _ = messages_for_template(format, [USER], TOOLS)
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"].endswith("\n\nhi")
    assert "get_weather" in TemplateOnly(source).render_chat(messages)


def test_without_tools_nothing_is_described() -> None:
    assert messages_for_template(KNOWS_NOTHING, [USER], {}) == ([USER], None)
    assert messages_for_template(KNOWS_ALL, [USER], {}) == ([USER], None)


def test_results_may_be_made_of_parts() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert messages_for_template(KNOWS_ALL, [result], {})[0][0]["content"] == "a\nb"
