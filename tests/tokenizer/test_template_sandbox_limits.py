"""Hostile templates end quickly with a one-line error and reach nothing, in any thread, without signals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mlxinfer.errors import TemplateError
from mlxinfer.tokenizer import template_sandbox
from mlxinfer.tokenizer.chat_template import ChatTemplates

TOO_LONG, TOO_LARGE, FORBIDDEN = "runs too long", "too large", "does what it must not"
MANY = "{% for i in range(99999) %}"
GROW = "{% set ns = namespace(x=START) %}{% for i in range(100) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


def render(source: str) -> str:
    return ChatTemplates({"default": source}, {}).render([{"role": "user", "content": "hi"}], None, {})


def complaint(source: str) -> str:
    """Return the error of a template that is rendered in a separate thread."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(TemplateError) as caught:
        pool.submit(render, source).result()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 60.0)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 50_000)
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    "source",
    [
        MANY + MANY + "{% endfor %}{% endfor %}",
        MANY + MANY + "{{ i }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if i > 5 %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}" + MANY + "text{% endfor %}{% endmacro %}" + MANY + "{% set x = f() %}{% endfor %}",
        "{% set x %}" + MANY + MANY + "some text{% endfor %}{% endfor %}{% endset %}",
        "{% block a %}{% endblock %}" + MANY + "{{ self.a() }}{% endfor %}",
        MANY + "{% set x = range(99999)|list %}{% endfor %}",
        MANY + "{{ range(99999)|sum }}{% endfor %}",
        MANY + "{{ range(99999)|map('string')|list|length }}{% endfor %}",
        "{{ range(99999)|select('in', range(99999)|list)|list|length }}",
        "{% set a = 'a' * 9000000 %}" + MANY + "{% set b = a[1:] %}{% endfor %}",
        "{% set a = 'a' * 9000000 %}{% set b = 'a' * 9000000 %}" + MANY + "{% if a == b %}{% endif %}{% endfor %}",
        "{% set a = 'a' * 9000000 %}" + MANY + "{% if 'b' in a %}{% endif %}{% endfor %}",
        "{% set ns = namespace(x=1) %}" + MANY + "{% set ns.x = [ns.x] %}{% endfor %}",
    ],
)
def test_loops_end(source: str) -> None:
    assert TOO_LONG in complaint(source)


def test_time_is_limited_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", -1.0)
    assert TOO_LONG in complaint("{{ 'a'.upper() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ " + "(" * 5000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{{ messages" + "[0]" * 3000 + " }}",
        "{% set ns = namespace(g=[1]) %}{% for i in range(3000) %}{% set ns.g = ns.g|map('string') %}{% endfor %}{{ ns.g|list }}",
    ],
)
def test_recursion_ends(source: str) -> None:
    assert "recurses too deeply" in complaint(source)


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 2 ** 100000000 }}",
        grow("3", "ns.x * ns.x"),
        grow("'ab'", "ns.x ~ ns.x"),
        grow("'ab'", "ns.x + ns.x"),
        grow("['ab']", "ns.x + ns.x"),
        grow("['ab']", "[ns.x, ns.x]"),
        grow("['ab']", "(ns.x, ns.x)"),
        grow("['ab']", "{'a': ns.x, 'b': ns.x}"),
        grow("['ab']", "dict(a=ns.x, b=ns.x)"),
        grow("{'k': 1}", "{'a': ns.x.values(), 'b': ns.x.values()}"),
        grow("[1]", "[ns.x, ns.x]|groupby(0)"),
        "{% set a = 'a' * 9000000 %}{{ a ~ a }}",
        "{% set x %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
        "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
        grow("'&'", "(ns.x ~ '&' * 99999)|forceescape"),
        "{{ '{0}{0}{0}{0}'.format('a' * 9000000) }}",
        "{{ ('%(a)s' * 100000) % {'a': 'b' * 100000} }}",
        "{{ ('%(a)s' * 100000)|format(a='b' * 100000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 1000000).replace('', 'b' * 100000) }}",
        "{{ ('a' * 100000)|list|join('b' * 100000) }}",
        "{{ ('b' * 100000).join('a' * 100000) }}",
        "{{ ('a\n' * 100000)|indent('b' * 100000) }}",
        "{{ ([[1]] * 9999)|tojson(indent=9999) }}",
    ],
)
def test_nothing_huge_is_made(source: str) -> None:
    assert TOO_LARGE in complaint(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ [1]|batch(1000000000, 0)|list }}",
        "{{ [1]|slice(1000000000, 0)|list }}",
        "{{ [1]|map('center', 1000000000)|list }}",
        "{{ 1.5|round(1000000000, 'ceil') }}",
        "{{ 'a'|indent(1000000000, true) }}",
        "{{ [1]|tojson(indent=1000000000) }}",
    ],
)
def test_no_absurd_numbers(source: str) -> None:
    assert "asks for 1000000000 of something" in complaint(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ strftime_now('%1000000000Y') }}",
    ],
)
def test_no_absurd_widths(source: str) -> None:
    assert "a field that is too wide" in complaint(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{% if ''.__class__ %}{% endif %}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ['x']|map(attribute='__class__')|list }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{}'.format_map({}) }}",
        "{{ messages.append(1) }}",
        "{{ messages.pop() }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].clear() }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.mro() }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.expandtabs(1000000000) }}",
        "{{ 'a'.translate({97: 'b' * 10000}) }}",
        "{{ cycler.next(1) }}",
        "{% set ns = namespace() %}{{ ns() }}",
        "{{ messages[0]() }}",
    ],
)
def test_nothing_is_reached(source: str) -> None:
    assert FORBIDDEN in complaint(source)


@pytest.mark.parametrize(
    "source", ["{{ lipsum(5) }}", "{{ [1]|random }}", "{{ 'a b'|wordwrap(1) }}", "{{ 'x'|urlize }}", "{{ [[1]]|sum(start=[]) }}"]
)
def test_what_no_chat_needs_is_not_there(source: str) -> None:
    complaint(source)


def test_namespaces_print_nothing_of_each_other() -> None:
    assert render(grow("namespace()", "namespace(a=ns.x, b=ns.x)")) == "<namespace>"


def test_a_template_of_a_million_characters_is_refused() -> None:
    assert "longer than" in complaint("x" * 2_000_000)


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(characters: int = 0) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(template_sandbox.Budget, "spend", lambda self, characters: interrupt())
    with pytest.raises(KeyboardInterrupt):
        render("{{ 'a'.upper() }}")


def test_a_long_conversation_fits() -> None:
    line = "<|{{ m.role }}|>{{ m.content|trim }}\n"
    source = "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}" + line + "{% endif %}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200}] * 4000
    assert len(ChatTemplates({"default": source}, {}).render(messages, None, {})) > 4_000_000
