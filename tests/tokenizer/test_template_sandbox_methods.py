"""String methods inside loops and blocks, where jinja2 adds its own arguments to each call."""

from __future__ import annotations

import pytest

from mlxinfer.tokenizer.template_sandbox import compile_template


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", "hi"),
        ("{% for m in messages %}{% if m.content.startswith(' h') %}yes{% endif %}{% endfor %}", "yes"),
        ("{% for m in messages %}{% set parts = m.content.split('i') %}{{ parts[0].lstrip('\\n ') }}{% endfor %}", "h"),
        ("{% for m in messages %}{{ m.content.replace('h', 'x') }}{{ '{}!'.format(m.content) }}{% endfor %}", " xi hi!"),
        ("{% block a %}{% set text = ' b ' %}{{ text.strip() }}{% endblock %}", "b"),
        ("{% macro f(t) %}{% for c in t %}{{ c.upper() }}{% endfor %}{% endmacro %}{{ f('ab') }}", "AB"),
    ],
)
def test_methods_of_texts_work_in_loops_and_blocks(source: str, expected: str) -> None:
    assert compile_template(source)({"messages": [{"role": "user", "content": " hi"}]}) == expected
