"""Outside a notebook, objects show as text and answers are printed."""

from __future__ import annotations

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.notebook import display, show, stream


def test_a_model_as_text_and_as_html(tmp_path):
    with LLM(tiny_directory(tmp_path / "tiny")) as llm:
        assert repr(llm) == "LLM('tiny')"
        assert "<b>tiny</b>" in show(llm)._repr_html_()


def test_an_interrupt_that_comes_too_late_changes_nothing(tmp_path, monkeypatch):
    """The answer had ended already, and its cell was being drawn for the last time."""
    ends, late = [], [KeyboardInterrupt]

    def end(cell, completion):
        ends.append(completion)
        if late:
            raise late.pop()

    monkeypatch.setattr(display._Cell, "end", end)
    with LLM(tiny_directory(tmp_path / "tiny", eos=False)) as llm:
        try:
            completion = stream(llm, "hello", SamplingParams(max_tokens=4, temperature=0))
        except KeyboardInterrupt:
            pytest.fail("the answer was lost")  # rather than all tests after this one
    assert ends == [completion, completion]
    assert completion.finish_reason == "length"
