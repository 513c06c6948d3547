"""Objects as HTML: complete, escaped, and text where it is no notebook."""

from __future__ import annotations

import pytest
from support.tiny_directory import tiny_directory

from mlxinfer import LLM, Completion, SamplingParams, TokenLogprob, Usage
from mlxinfer.errors import SettingError
from mlxinfer.notebook import compare
from mlxinfer.notebook.formats import _list_html, completion_html, model_html, stats_html

USAGE = Usage(prompt_tokens=3, completion_tokens=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    with LLM(tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False), dtype="float32") as opened:
        yield opened


def test_tokens_are_shaded_by_probability_with_their_alternatives():
    sure, unsure = TokenLogprob(1, "<b>", -0.001), TokenLogprob(2, "x", -2.0, ((2, "x", -2.0), (3, '"y"', -2.5)))
    html = completion_html(Completion("<b>x", [1, 2], "stop", USAGE, [sure, unsure], reasoning="a < b"))
    assert "<b>" not in html
    assert html.count("rgba(") == 1
    assert "&#x27;&quot;y&quot;&#x27;" in html
    assert "a &lt; b" in html


def test_only_lists_of_completions_are_columns():
    one = Completion("a", [1], "stop", USAGE)
    assert _list_html([one, one]).count("flex:1 1") == 2
    assert _list_html([]) is None
    assert _list_html([one, 3]) is None


def test_a_model_and_its_statistics(llm):
    llm.generate("abc", SamplingParams(max_tokens=3))
    assert "llama" in model_html(llm)
    assert "requests" in stats_html(llm.stats())


def test_compare(llm, tmp_path):
    folder = tiny_directory(tmp_path / "again", eos=False)
    same = {"path_or_id": folder, "dtype": "float32"}
    other = tiny_directory(tmp_path / "other", "mistral", eos=False)
    found = compare([llm, same, {"path_or_id": other, "kv": "8"}], ["abc", "hello"], SamplingParams(temperature=0, max_tokens=6))
    assert [row.prompt for row in found.rows] == ["abc"] * 3 + ["hello"] * 3
    first, again, third = found.rows[:3]
    assert first.kl == 0 == pytest.approx(again.kl, abs=1e-9)
    assert first.top1 == again.top1 == 1
    assert first.logprob == pytest.approx(again.logprob)
    assert third.kl > 1e-4
    assert third.model == "other kv=8"
    assert "KL" in found._repr_html_()
    assert repr(found).count("\n") == 5


def test_what_cannot_be_compared(llm):
    with pytest.raises(SettingError, match="settings to compare name their model"):
        compare([{"kv": "4"}], "abc")
    with pytest.raises(SettingError, match="no model to compare"):
        compare([], "abc")
