"""Formats by name and for tokenizers, and that nothing is imported or rendered before it is needed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from templates import NO_TOOLS, SHAPES
from tokenizers import Tokenizer as Tokenizers
from tokenizers.models import WordLevel

from mlxinfer.errors import SettingError
from mlxinfer.output_format import output_format
from mlxinfer.output_format.detect import derived
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.tokenizer.backend import TokenizerParts, TokenizersBackend
from mlxinfer.tokenizer.tokenizer import Tokenizer
from tests.support.schemas.tool_chats import TemplateOnly


def _tokenizer(template: str | None) -> Tokenizer:
    backend = TokenizersBackend(Tokenizers(WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="a")))
    templates = {"default": template} if template is not None else {}
    return Tokenizer(TokenizerParts(backend, 2, None, frozenset({1}), {}, templates))


def test_a_format_is_found_out_once_for_a_tokenizer() -> None:
    tokenizer = _tokenizer(SHAPES["qwen3"].template)
    found = output_format(tokenizer)
    assert output_format(tokenizer) is found
    assert output_format(_tokenizer(SHAPES["qwen3"].template)) == found
    assert found.source == "chat template"
    assert found.calls is not None
    assert found.calls.section_end == ""


@pytest.mark.parametrize("template", [None, NO_TOOLS, "{{ raise_exception('no') }}", "{% for %}"])
def test_there_is_always_a_form_of_calls(template: str | None) -> None:
    found = output_format(_tokenizer(template))
    assert (found.source, found.reasoning) == ("described", None)
    assert found.calls is not None
    assert not found.tools_in_template


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_can_be_chosen(name: str) -> None:
    found = output_format(_tokenizer(NO_TOOLS), name)
    assert (found.calls, found.source) == (FAMILIES[name].calls, "option")


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(SettingError, match=r"unknown tool format 'nope': use one of .*hermes"):
        output_format(_tokenizer(NO_TOOLS), "nope")


def test_families_whose_templates_say_nothing_are_in_a_table() -> None:
    lfm2 = NO_TOOLS + "{%- if false %}List of tools: {%- endif %}"
    found = derived(TemplateOnly(lfm2))
    assert (found.source, found.calls) == ("table", FAMILIES["lfm2"].calls)
    harmony = SHAPES["mistral"].template + "{%- if false %}<|start|>assistant<|channel|>analysis<|message|><|end|>{%- endif %}"
    found = derived(TemplateOnly(harmony))
    assert (found.source, found.calls) == ("table", FAMILIES["harmony"].calls)
    assert found.reasoning is not None
    assert found.reasoning.end == "<|end|>"


def test_a_template_that_takes_its_time_does_not_hold_up_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.output_format.from_template._MOST_SECONDS", 0.2)
    slow = "{% for i in range(20000) %}{% set x = i %}{% endfor %}" + SHAPES["qwen3"].template
    huge = "{{ '{' * 300000 }}" + SHAPES["qwen3"].template
    began = time.thread_time()
    assert derived(TemplateOnly(huge)).source == "described"
    derived(TemplateOnly(slow))
    assert time.thread_time() - began < 4


def test_importing_it_imports_no_jinja2() -> None:
    code = "import sys, mlxinfer.output_format, mlxinfer.output_format.table; print('jinja2' in sys.modules, 'mlx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
