"""Reports as HTML, objects in front ends without magics, and `await` in the loop of a running notebook."""

from __future__ import annotations

import numpy as np
import pytest
from support.models.tiny_directory import tiny_directory
from support.processes.notebook_kernel import notebook_kernel
from support.processes.optional import needs

from mlxinfer import Completion, Usage
from mlxinfer.errors import SettingError
from mlxinfer.evaluation.figures import Scores, figures
from mlxinfer.evaluation.kv import KVEvaluation, KVLoss
from mlxinfer.evaluation.measure import Comparison
from mlxinfer.evaluation.texts import Windows
from mlxinfer.notebook import show


def test_reports_are_tables():
    window, surprise = np.repeat(np.arange(2, dtype=np.int32), 3), np.full(6, 2.0)
    teacher = Scores(window, surprise)
    student = Scores(window, surprise, np.full(6, 0.25), np.array([True, True, True, False, True, True]))
    told = figures("small <b>", (1_500_000, 4_000_000), student, teacher)
    found = Comparison(figures("large", (8_000_000, 4_000_000), teacher), (told,), (), (student,), Windows((), "text"), ("a note",))
    html = show(found).html
    assert "small &lt;b&gt;" in html
    assert "0.25" in html
    assert "83.3%" in html
    assert "a note" in html
    kv = KVEvaluation("m", (KVLoss("8", 0.001, 0.0001, 0.01, 0.99, 0.001), KVLoss("4", 0.1, None, 0.2, 0.9, None)), (), "8", 0.001, 100)
    assert "8 (auto)" in show(kv)._repr_html_()


def test_answers_are_shown_without_magics():
    one = Completion("a < b", [1], "stop", Usage(1, 1))
    assert "a &lt; b" in show(one)._repr_html_()
    assert show([one, one]).html.count("flex:1 1") == 2
    for other in (3, [3], {"a": 1}):
        with pytest.raises(SettingError, match="show cannot display a"):
            show(other)


def test_await_in_the_loop_that_a_notebook_runs(tmp_path):
    needs("ipykernel")
    model = tiny_directory(tmp_path / "tiny", eos=False)
    with notebook_kernel() as cell:
        cell.run(f"from mlxinfer import LLM, AsyncLLM, SamplingParams\nmany = AsyncLLM({str(model)!r}); await many.ready()")
        told = cell.run("found = await many.generate(['abc', 'hello'], SamplingParams(max_tokens=4)); print(len(found))")
        assert told == "2"
        told = cell.run(
            "count = 0\n"
            "async for chunk in many.stream('abc', SamplingParams(max_tokens=4)):\n    count += len(chunk.token_ids)\nprint(count)"
        )
        assert told == "4"
        told = cell.run(f"with LLM({str(model)!r}) as llm:\n    print(len(llm.generate('abc', SamplingParams(max_tokens=3))[0].token_ids))")
        assert told == "3"
        cell.run("await many.close()")
