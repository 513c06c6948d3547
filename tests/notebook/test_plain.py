"""What objects are where nothing was registered for them: plain text, which names the model."""

from __future__ import annotations

from support.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.notebook import show


def test_a_model_as_text_and_as_html(tmp_path):
    with LLM(tiny_directory(tmp_path / "tiny")) as llm:
        assert repr(llm) == "LLM('tiny')"
        assert "<b>tiny</b>" in show(llm)._repr_html_()
