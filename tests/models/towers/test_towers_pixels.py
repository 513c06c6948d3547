"""From pictures to features: what the image processors give is what the towers take."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.models.towers import GOLDEN, cases_of, distance, load_tower

from mlxinfer.vision.families import open_processor
from mlxinfer.vision.picture import read_picture


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "qwen3_vl", "smolvlm"])
def test_pictures_give_the_features_of_transformers(family: str) -> None:
    """The golden checkpoints with pictures are those of the towers; `Layout.pieces` are the sizes of a tower's pieces."""
    processor, tower = open_processor(GOLDEN.parent / family), load_tower(GOLDEN / family)
    with np.load(GOLDEN.parent / family / "reference.npz") as reference:
        images = [read_picture(reference[f"two_image_{number}"]) for number in range(2)]
    found = []
    for image in images:
        pixels = processor.pixels(image)
        encoded = tower.features(mx.array(pixels.normalized()), pixels.layout.pieces)
        assert encoded.features.shape[0] == pixels.layout.tokens
        found.append(encoded)
    cases = [expected for _, _, expected in cases_of(family)]
    assert distance(mx.concatenate([each.features for each in found]), np.concatenate([case["features"] for case in cases])) < 2e-5
    for layer, rows in enumerate(cases[0].get("deepstack", ())):
        assert distance(mx.concatenate([each.deepstack[layer] for each in found]), rows) < 2e-5
