"""Two processes on loopback answer about images exactly what one does, and what transformers does."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.engines.pair import Scenario, run_pair
from support.http.ports import free_port

GOLDEN = Path(__file__).parents[1] / "golden" / "vision"
FAMILIES = ["smolvlm", "qwen3_vl", "qwen3_5", "gemma3"]
"""One with usual positions, two with positions of three axes (one adds rows after its first blocks), one with spans."""


def scenario_of(family: str, folder: Path) -> Scenario:
    """A prompt with two images, read twice, and one without."""
    pictures = []
    with np.load(GOLDEN / family / "reference.npz") as reference:
        for number in (0, 1):
            pictures.append(str(folder / f"{family}-{number}.png"))
            Image.fromarray(reference[f"two_image_{number}"]).save(pictures[-1])
        prompt = {"prompt": str(reference["two_prompt"]), "images": pictures}
    params = [{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}] * 2
    return Scenario(str(GOLDEN / family), [prompt, "one sentence."], params, {"max_context": 512, "dtype": "float32"}, rounds=2)


@pytest.mark.long
def test_answers_about_images_are_those_of_one_process(tmp_path: Path) -> None:
    scenarios = [scenario_of(family, tmp_path) for family in FAMILIES]
    for family, found in zip(FAMILIES, run_pair(scenarios, free_port()), strict=True):
        assert found["tokens"] == found["alone"]["tokens"], family
        with np.load(GOLDEN / family / "reference.npz") as reference:
            assert [answers[0] for answers in found["tokens"]] == [reference["two_greedy"].tolist()] * 2, family
        assert found["reused_tokens"] > 0
