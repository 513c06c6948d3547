"""`notebooks/run.py` writes back what has changed, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from support.processes.optional import needs


def _settled() -> Any:
    needs("nbclient")
    spec = importlib.util.spec_from_file_location("run_notebooks", Path(__file__).parents[2] / "notebooks" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.settled


def test_only_what_means_something_is_a_difference() -> None:
    from nbformat.v4 import new_output

    settled = _settled()
    printed = [new_output("stream", name="stdout", text="8 tokens at 51.3 tokens/s, 0.18 s, 1,203 ms, peak memory 210 MB\n82.4 MB")]
    again = [
        new_output("stream", name="stdout", text="8 tokens at 1,049.9 tokens/s, 12 s, 3 ms, "),
        new_output("stream", name="stdout", text="peak memory 9 MB\n82.4 MB"),
    ]
    assert settled(again, printed) is printed
    smaller = [new_output("stream", name="stdout", text="8 tokens at 51.3 tokens/s, 0.18 s, 1,203 ms, peak memory 210 MB\n58.9 MB")]
    assert settled(smaller, printed) is smaller
    table = [new_output("execute_result", {"text/plain": "KL 0.06 51.2 tokens/s", "image/png": "aa"})]
    assert settled([new_output("execute_result", {"text/plain": "KL 0.06 4 tokens/s", "image/png": "aa"})], table) is table
    for other in ({"text/plain": "KL 0.07 51.2 tokens/s", "image/png": "aa"}, {"text/plain": "KL 0.06 51.2 tokens/s", "image/png": "ab"}):
        changed = [new_output("execute_result", other)]
        assert settled(changed, table) is changed


def test_a_number_in_a_table_is_a_difference_unless_it_is_a_speed() -> None:
    from nbformat.v4 import new_output

    from mlxinfer.notebook.compare import ComparedAnswer, Comparison
    from mlxinfer.notebook.html import table

    settled = _settled()

    def shown(html: str) -> list[Any]:
        return [new_output("execute_result", {"text/plain": "", "text/html": html})]

    def speed(tokens_per_second: float) -> list[Any]:
        return shown(Comparison([ComparedAnswer("m", "p", "x", -1.0, 0.0, 1.0, tokens_per_second, 1234.0)])._repr_html_())

    before = speed(51.2)
    assert settled(speed(4.0), before) is before
    before, changed = (shown(table(("bits", "matrix"), [(bits, "q_proj")])) for bits in ("4.5", "8.5"))
    assert settled(changed, before) is changed
