"""Vision towers give the features of transformers, from names of the hub and of mlx-vlm, in float32 and in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.weights import CheckpointWeights
from mlxinfer.models.towers import TOWERS, Tower, tower_of

GOLDEN = Path(__file__).parents[2] / "golden" / "vision" / "towers"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
Arrays = dict[str, np.ndarray[Any, Any]]


def config_of(family: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / family / "config.json").read_text())
    return config


def load(directory: Path, config: dict[str, Any], dtype: mx.Dtype = mx.float32) -> Tower:
    """Load a tower from a checkpoint that has nothing else."""
    weights = CheckpointWeights(SafetensorsCheckpoint(directory), dtype)
    tower = tower_of(config, weights)
    weights.finish()
    return tower


def cases_of(family: str) -> Iterator[tuple[mx.array, list[tuple[int, int]], Arrays]]:
    """Yield pixels, sizes and the expected arrays of each case."""
    with np.load(GOLDEN / family / "reference.npz") as reference:
        for case in json.loads(str(reference["cases"])):
            pixels = mx.array(reference["values"][reference[f"{case}_codes"]])
            sizes = [(int(height), int(width)) for height, width in reference[f"{case}_sizes"]]
            names = [name for name in ("features", "deepstack") if f"{case}_{name}" in reference.files]
            yield pixels, sizes, {name: reference[f"{case}_{name}"] for name in names}


def distance(found: mx.array, expected: np.ndarray[Any, Any]) -> float:
    """Return the largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(np.array(found.astype(mx.float32)) - expected).max() / np.abs(expected).max())


def assert_features(tower: Tower, family: str, tolerance: float) -> None:
    for pixels, sizes, expected in cases_of(family):
        found = tower.features(pixels, sizes)
        assert distance(found.features, expected["features"]) < tolerance
        deepstack = expected.get("deepstack", ())
        assert len(found.deepstack) == len(deepstack)
        for own, theirs in zip(found.deepstack, deepstack, strict=True):
            assert distance(own, theirs) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_those_of_transformers(family: str) -> None:
    assert_features(load(GOLDEN / family, config_of(family)), family, 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_in_bfloat16_are_near(family: str) -> None:
    tower = load(GOLDEN / family, config_of(family), mx.bfloat16)
    assert_features(tower, family, 3e-2)
    pixels, sizes, _ = next(cases_of(family))
    assert tower.features(pixels, sizes).features.dtype == mx.bfloat16


def test_every_family_has_a_reference() -> None:
    read = {TOWERS[config_of(family)["model_type"]] for family in FAMILIES}
    assert read == set(TOWERS.values())
