"""The benchmark of conversations that go on in a new process."""

from __future__ import annotations

import pytest

from benchmarks.resume import Turn, measure, table


def test_the_table_has_medians_of_pairs():
    resumed = [Turn(3000, 2990, 0.1 * factor, 0.2, 1.0, 2.0) for factor in (1, 2, 4)]
    anew = [Turn(3000, 0, 2.0, 4.0, 3.0, 8.0) for _ in range(3)]
    text = table({"resumed": resumed, "anew": anew})
    assert text.startswith("3000 tokens of prompt, 2990 of them from disk; 3 pairs")
    assert "| of the turn | 0.200 | 2.000 | 10.0% (5.0% to 20.0%) |" in text
    assert "| its processor time | 2.000 | 8.000 | 25.0% (25.0% to 25.0%) |" in text


@pytest.mark.model
@pytest.mark.slow
def test_a_conversation_comes_from_disk() -> None:
    found = measure("smollm2", 300, 1)
    (resumed,), (anew,) = found["resumed"], found["anew"]
    assert anew.cached == 0
    assert resumed.tokens == anew.tokens > 200
    # All that was computed, but the last token of the answer and the template's end of it; then the question.
    assert resumed.tokens - resumed.cached < 40
    assert 0 < resumed.first_s < resumed.whole_s


@pytest.mark.slow
def test_what_a_process_says_is_the_error() -> None:
    with pytest.raises(RuntimeError, match="no-such-model"):
        measure("no-such-model", 300, 1)
