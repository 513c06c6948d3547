"""`compare` measures a model's speed after its first steps."""

from __future__ import annotations

from typing import Any

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.notebook import compare
from mlxinfer.notebook.compare import ComparedAnswer, Comparison


def test_a_model_has_been_running_before_its_speed_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    generate = LLM.generate

    def noted(llm: LLM, prompts: Any, *others: Any) -> Any:
        found = generate(llm, prompts, *others)
        calls.append([completion.usage.prompt_tokens for completion in found])
        return found

    monkeypatch.setattr(LLM, "generate", noted)
    folder = tiny_directory(tmp_path / "tiny", eos=False)
    found = compare([folder, {"path_or_id": folder, "kv": "8"}], ["abc", "hello"], SamplingParams(temperature=0, max_tokens=4))
    assert calls == [[1], [3, 5]] * 2  # one token is too short for a page, so that no answer finds its prompt computed
    assert len(found.rows) == 4


def test_a_prompt_is_shown_once_and_a_long_one_by_its_end() -> None:
    long = "first " + "word " * 60 + "last"
    answers = [ComparedAnswer(model, prompt, "x", -1.0, 0.0, 1.0, 5.0, 9.0) for prompt in (long, "short") for model in ("a", "b")]
    html = Comparison(answers)._repr_html_()
    assert html.count("last<") == html.count(">short<") == 1
    assert "first" not in html
    assert html.count(">a<") == html.count(">b<") == 2
