"""Formats derived from chat templates; rendered calls are read back unchanged in any chunks."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from templates import NO_TOOLS, SHAPES

from mlxinfer.errors import MLXInferError
from mlxinfer.output_format.detect import derived
from mlxinfer.output_format.format import OutputFormat
from tests.support.schemas.tool_chats import TemplateOnly, calls_in, calls_message, check_every_cut, random_calls, read, rendered_answer

REAL = os.environ.get("MLXINFER_TEST_TEMPLATES")
"""A directory of chat templates (`*.jinja`), such as llama.cpp's `models/templates`."""


def _check_round_trips(templates: TemplateOnly, format: OutputFormat, seed: str, count: int, cuts: int, groups: int) -> None:
    rng = random.Random(seed)
    assert format.calls is not None
    for number in range(count):
        calls = random_calls(rng, format.calls.parallel and number != 0)
        begun, text = rendered_answer(templates, format, calls_message(calls))
        assert calls_in(read(format, text, begun=begun)) == calls, text
        if number < cuts:
            check_every_cut(format, text, begun, rng, groups)


@pytest.mark.long
@pytest.mark.parametrize("family", SHAPES)
def test_calls_are_read_back_at_every_cut(family: str) -> None:
    shape = SHAPES[family]
    templates = TemplateOnly(shape.template)
    format = derived(templates, ends=["<|im_end|>"])
    assert format.source == "chat template", format
    assert format.calls is not None
    assert format.calls.kind == shape.kind
    assert (format.reasoning.begin if format.reasoning else "") == shape.reasoning
    assert format.tools_in_template
    assert format.calls_in_template
    _check_round_trips(templates, format, family, count=6, cuts=1, groups=20)


def test_a_template_without_tools_gets_them_described() -> None:
    templates = TemplateOnly(NO_TOOLS)
    format = derived(templates)
    assert (format.source, format.tools_in_template, format.calls_in_template) == ("described", False, False)
    assert not format.results_in_template
    _check_round_trips(templates, format, "described", count=6, cuts=1, groups=20)


def test_a_template_that_refuses_all_is_described() -> None:
    format = derived(TemplateOnly("{{ raise_exception('no') }}"))
    assert format.source == "described"
    assert format.calls is not None


def test_a_template_that_is_none_is_described() -> None:
    for source in ("{% for %}", "{{ 1 / 0 }}", "", "{% for i in range(10 ** 9) %}{% endfor %}"):
        assert derived(TemplateOnly(source)).source == "described"


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="MLXINFER_TEST_TEMPLATES names no directory of chat templates")
def test_real_templates_are_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Few templates cannot be used at all, or write values that cannot be read back."""
    exact, failed = [], []
    for path in sorted(Path(REAL or "").glob("*.jinja")):
        templates = TemplateOnly(path.read_text(encoding="utf-8"))
        try:
            _check_round_trips(templates, derived(templates), path.stem, count=40, cuts=2, groups=100)
            exact.append(path.stem)
        except (AssertionError, MLXInferError) as error:
            failed.append((path.stem, str(error)[:200]))
    with capsys.disabled():
        sys.stdout.write(f"{len(exact)} of {len(exact) + len(failed)} templates are read back exactly; not: {failed}\n")
    assert len(exact) >= 0.9 * (len(exact) + len(failed))
