"""Objects as HTML: complete, escaped, and as text outside a notebook."""

from __future__ import annotations

import re
from html import escape

import pytest
from support.models.tiny_directory import tiny_directory

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


@pytest.mark.parametrize(
    ("tokens", "text", "shown"),
    [
        (["Paris", ".", "<|im_end|>"], "Paris.", "Paris."),
        (["<think>", "so", "</think>", "\n", "Paris", "</s>"], "Paris", "Paris"),
        (["a", " STOP"], "a ", "a "),
        (["\ufffd", "\ufffd", "<eos>"], "\u00e9", "\ufffd\ufffd"),
        (["1 ", "<b>", " 2", "<|im_end|>"], "1 <b> 2", "1 <b> 2"),
    ],
)
def test_special_tokens_are_no_part_of_a_shaded_answer(tokens, text, shown):
    logprobs = [TokenLogprob(number, token, -2.0) for number, token in enumerate(tokens)]
    html = completion_html(Completion(text, list(range(len(tokens))), "stop", USAGE, logprobs))
    assert "".join(re.findall(r"<span[^>]*>(.*?)</span>", html)) == escape(shown)


def test_only_lists_of_completions_are_columns():
    one = Completion("a", [1], "stop", USAGE)
    assert _list_html([one, one]).count("flex:1 1") == 2
    assert _list_html([]) is None
    assert _list_html([one, 3]) is None


def test_a_model_and_its_statistics(llm):
    llm.generate("abc", SamplingParams(max_tokens=3))
    html = model_html(llm)
    assert "llama" in html
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
    assert repr(found).count("\n") == 6  # five more lines and a note


def test_a_quantized_cache_that_was_not_used_is_told(llm, tmp_path):
    four = {"path_or_id": tiny_directory(tmp_path / "again", eos=False), "dtype": "float32", "kv": "4"}
    short, long, params = "abc", "hello you " * 20, SamplingParams(temperature=0, max_tokens=6)
    found = compare([llm, four], short, params)
    why = "no page was full, nothing was quantized: a page has 64 tokens. Compare longer prompts"
    assert found.notes == (f"again dtype=float32 kv=4: {why}",)
    assert found.rows[1].kl == 0
    assert "no page was full" in found._repr_html_()
    assert repr(found).count("\n") == 2
    found = compare([llm, four], long, params)
    assert found.notes == ()
    assert found.rows[1].kl > 1e-6
    assert "with 1 of 2 prompts no page was full" in compare([llm, four], [short, long], params).notes[0]
    assert compare([llm], short, params).notes == ()


def test_what_cannot_be_compared(llm):
    with pytest.raises(SettingError, match="settings to compare name their model"):
        compare([{"kv": "4"}], "abc")
    with pytest.raises(SettingError, match="at least one model"):
        compare([], "abc")
