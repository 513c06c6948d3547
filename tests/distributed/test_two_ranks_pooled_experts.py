"""Two machines, each with a file of its own blocks' experts: exactly what one with all experts in memory answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines.pair import Scenario, run_pair
from support.engines.sparse_tiny import sparse_tiny
from support.http.ports import free_port

from mlxinfer import LLM, SamplingParams

PROMPTS = [[(i * 7) % 90 + 3 for i in range(70)], [5, 6, 7], [3, 4]]
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.long
def test_answers_are_those_of_the_resident_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "home"))
    model = sparse_tiny(tmp_path / "model", "gpt_oss", "bfloat16")
    settings = {"max_context": 256, "experts_memory": 1e-6}
    (found,) = run_pair([Scenario(str(model), PROMPTS, [GREEDY] * 3, settings, rounds=2)], free_port())
    with LLM(model, max_context=256, experts_memory=0) as llm:
        want = [list(answer.token_ids) for answer in llm.generate(PROMPTS, SamplingParams(**GREEDY))]
    assert found["tokens"] == found["alone"]["tokens"] == [want, want]
    assert len(list((tmp_path / "home" / "experts").glob("*.experts"))) == 3  # of both ranks, and of the process alone
