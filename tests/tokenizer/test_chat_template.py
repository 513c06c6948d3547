from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.errors import TemplateError
from mlxinfer.tokenizer.chat_template import ChatTemplates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": "Be <b>brief</b>."},
    *HELLO,
    {"role": "assistant", "content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "é": [True, None]}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]


def render(source: str, messages: list[Any] = HELLO, tools: list[Any] | None = None, **variables: Any) -> str:
    return ChatTemplates({"default": source}, SPECIAL).render(messages, tools, {"add_generation_prompt": True, **variables})


FEATURES = [
    "{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant{% endif %}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ documents is none }}|{{ documents is defined }}|{{ tools is none }}",
    "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  user {{ m.content|trim }}\n    {%- endif %}\n{%- endfor %}\n",
    "  {% if true %}\n  x\n  {% endif %}\ny\n",
    "{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ {'b': 1, 'a': '<&é'}|tojson(sort_keys=true, separators=(',', ':')) }}",
    "{{ messages[2].tool_calls[0].function.arguments|tojson if messages|length > 2 }}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + [m.role] %}"
    "{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem.role if loop.previtem }}"
    "{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% macro say(m, end='!') %}{{ m.content }}{{ end }}{{ caller() if caller }}{% endmacro %}"
    "{{ say(messages[0]) }}{{ say(messages[0], end='?') }}"
    "{% call say(messages[0]) %}inner{% endcall %}",
    "{% generation %}{% set inside = 1 %}{{ messages[0].content }}{% endgeneration %}{{ inside is defined }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ 'abc'.startswith('a') }}{{ 'aXbX'.replace('X', '-', 1) }}{{ '-'.join(['a', 'b']) }}",
    "{{ '%s is %d' % ('x', 3) }}{{ '%05.1f|%s'|format(2.25, 'y') }}"
    "{{ '{:>5}|{a}|{0[0]}'.format('zz', a=1) }}{{ 'a'.center(5) }}{{ 'b'.rjust(3, '.') }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('nope', 'none') }}{{ messages[0]|dictsort }}",
    "{{ messages[::-1][0].role }}{{ messages[0].content[1:3] }}"
    "{{ range(3)|list }}{{ range(1, 9, 3)|sum }}{{ (1, 2) + (3,) }}{{ 'ab' * 2 }}",
    "{{ 'line one\nline two\n\nend'|indent(2) }}|{{ 'a\nb'|indent(1, first=true, blank=true) }}|{{ ''|indent }}|{{ 'x'|center(5) }}",
    "{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 8 }}{{ 7 / 2 }}{{ -1 }}{{ 3.456|round(1) }}{{ '5'|int + 1 }}{{ [3, 1, 2]|sort|reverse|list }}",
    "{{ undefined_name }}|{{ messages[0].nope }}|{{ undefined_name is defined }}|{{ undefined_name|default('d') }}|{{ none or 'x' }}",
    "{% set x %}captured {{ 1 }}{% endset %}{{ x ~ '/' ~ 2 ~ none }}{% filter upper %}loud{% endfilter %}{{ 'a' if false }}",
    "{% for row in [1, 2, 3, 4]|batch(3, 0) %}{{ row }}{% endfor %}{% for row in [1, 2, 3]|slice(2) %}{{ row }}{% endfor %}",
    "{% for item in [[1, [2]], [3]] recursive %}{% if item is iterable %}[{{ loop(item) }}]{% else %}{{ item }}{% endif %}{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ m.role }}{% else %}nobody{% endfor %}{{ dict(a=1) }}{{ {'a': 1}.a }}",
    "{{ enable_thinking }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ count + 1 }}",
    "{{ 'a' in ['a'] }}{{ 'a' not in 'b' }}{{ 1 < 2 }}{{ messages[0] is mapping }}{{ 'x' is string }}{{ 3 is divisibleby 3 }}",
]


@pytest.mark.parametrize("source", FEATURES, ids=range(len(FEATURES)))
@pytest.mark.parametrize("messages", [HELLO, TALK], ids=["short", "long"])
def test_renders_as_transformers_does(source: str, messages: list[Any]) -> None:
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"enable_thinking": False, "count": 2}
    for tools in (None, TOOLS):
        [[expected], _] = chat.render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=True, **SPECIAL, **variables
        )
        assert render(source, messages, tools, **variables) == expected


def test_time_now() -> None:
    assert render("{{ strftime_now('%Y')|int > 2024 }}") == "True"


def test_content_in_parts_reaches_the_template() -> None:
    messages = [{"role": "user", "content": ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})}]
    assert render("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", messages) == "ab"


def test_the_tool_template_is_for_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert templates.render(HELLO, None, {}) == templates.render(HELLO, [], {}) == "plain"
    assert templates.render(HELLO, TOOLS, {}) == "tools"
    assert templates.default == "plain"


@pytest.mark.parametrize("sources", [{}, {"tool_use": "x"}])
def test_a_missing_template_tells_what_to_do(sources: dict[str, str]) -> None:
    templates = ChatTemplates(sources, {})
    assert templates.default is None
    with pytest.raises(TemplateError, match=r"no chat template.*chat_template.jinja beside the model"):
        templates.render(HELLO, None, {})


def test_raise_exception_gives_its_reason() -> None:
    with pytest.raises(TemplateError, match="refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must\nalternate') }}")


@pytest.mark.parametrize("messages", ["hello", ["hello"], [HELLO], [{"role": "user", "content": object()}], [{"role": b"user"}]])
def test_messages_are_mappings_of_plain_values(messages: Any) -> None:
    with pytest.raises(TemplateError, match="messages"):
        render("{{ messages }}", messages)


def test_messages_that_hold_themselves() -> None:
    message: dict[str, Any] = {"role": "user"}
    message["content"] = message
    with pytest.raises(TemplateError, match="nested too deeply"):
        render("{{ messages }}", [message])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ messages", "cannot be read: line 1"),
        ("\n{% endfor %}", "line 2: Encountered unknown tag 'endfor'"),
        ("{{ 'a'|nofilter }}", "No filter named 'nofilter'"),
        ("{{ messages[0].nope.nope }}", "has no attribute 'nope'"),
        ("{{ nobody() }}", "'nobody' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "the chat template fails"),
        ("{% include 'x' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% extends messages %}", "no loader"),
    ],
)
def test_a_template_that_fails_is_told_in_one_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@given(
    source=st.lists(st.sampled_from(["{{", "}}", "{%", "%}", " if ", " for ", " in ", "messages", "'", "1", "|join", "(", ")", "[", ".x"]))
)
@settings(max_examples=examples(200), deadline=None)
def test_any_template_renders_or_fails_in_one_line(source: list[str]) -> None:
    try:
        message = render("".join(source)) and ""
    except TemplateError as error:
        message = str(error)
    assert "\n" not in message
