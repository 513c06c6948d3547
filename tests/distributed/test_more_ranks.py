"""Three machines by layers and four by heads answer exactly what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines.pair import Scenario, run_pair
from support.http.ports import free_port
from support.models.wide import wide_directory

TRUNK = [(i * 7) % 90 + 3 for i in range(100)]
PROMPTS = [TRUNK, [*TRUNK[:70], 9], [5, 6, 7] * 20]
PARAMS = [
    {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 30, "temperature": 0.9, "seed": 5, "n": 2, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
]


@pytest.mark.slow  # four processes
@pytest.mark.parametrize(("ranks", "splits"), [(3, ["pipeline"]), (4, ["pipeline", "tensor"])])
def test_they_answer_alike(ranks: int, splits: list[str], tmp_path: Path) -> None:
    model = str(wide_directory(tmp_path / "wide"))
    settings = {"max_context": 256, "dtype": "float32"}
    scenarios = [Scenario(model, PROMPTS, PARAMS, settings, preempts=25, rounds=2, split=split) for split in splits]
    for found in run_pair(scenarios, free_port(), 400, ranks):
        assert found["tokens"] == found["alone"]["tokens"]
        assert found["reused_tokens"] > 0
        assert found["preemptions"] > 0
        held = [each["held"] for each in found["read"]]
        assert len(held) == ranks - 1
        assert max(held) <= found["alone"]["weights"] * (0.5 if ranks == 3 else 0.4)
