"""Two processes on loopback answer about images exactly what one does, and what transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.engines.pair import Scenario, run_pair
from support.http.ports import free_port
from support.models.seeing import GOLDEN, cases
from support.processes.once_per_run import once_per_run
from support.vision.table import NAMES, array, sees


def scenario_of(name: str, folder: Path) -> Scenario:
    """A prompt with two images, read twice, and one without."""
    paths = [str(folder / f"{name}-{number}.png") for number in range(2)]
    for path, picture in zip(paths, cases(name)["two"].pictures, strict=True):
        Image.fromarray(picture).save(path)
    prompt = {"prompt": str(array(name, "two_prompt")), "images": paths}
    params = [{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}] * 2
    return Scenario(str(GOLDEN / name), [prompt, "one sentence."], params, {"max_context": 512, "dtype": "float32"}, rounds=2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers for every family, by the same two processes; all workers of a run share them."""
    folder = tmp_path_factory.mktemp("pictures")
    made = once_per_run(tmp_path_factory, "two_ranks", lambda: run_pair([scenario_of(name, folder) for name in NAMES], free_port()))
    return dict(zip(NAMES, made, strict=True))


@pytest.mark.long
@sees("two ranks")
def test_answers_of_two_ranks(name: str, found: dict[str, Any]) -> None:
    assert found[name]["tokens"] == found[name]["alone"]["tokens"]
    assert [answers[0] for answers in found[name]["tokens"]] == [cases(name)["two"].greedy] * 2
    assert found[name]["reused_tokens"] > 0
