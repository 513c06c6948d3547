"""Golden vision towers: their configs, tensors and cases, and loading them from any tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.weights import CheckpointWeights
from mlxinfer.models.towers import Tower, tower_of

GOLDEN = Path(__file__).parents[2] / "golden" / "vision" / "towers"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
Arrays = dict[str, np.ndarray[Any, Any]]


def config_of(family: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / family / "config.json").read_text())
    return config


def tensors_of(family: str) -> dict[str, mx.array]:
    found = mx.load(str(GOLDEN / family / "model.safetensors"))
    assert isinstance(found, dict)
    return found


def load_tower(directory: Path, dtype: mx.Dtype = mx.float32) -> Tower:
    """Load a tower from a checkpoint that has nothing else. Raises `WeightsError`."""
    checkpoint = SafetensorsCheckpoint(directory)
    weights = CheckpointWeights(checkpoint, dtype)
    tower = tower_of(checkpoint.config, weights)
    weights.finish()
    return tower


def save_tower(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Path:
    """Write a checkpoint; returns its directory."""
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tensors), {"format": "pt"})
    return directory


def cases_of(family: str) -> Iterator[tuple[mx.array, list[tuple[int, int]], Arrays]]:
    """Yield pixels, sizes and the expected arrays of each case."""
    with np.load(GOLDEN / family / "reference.npz") as reference:
        for case in json.loads(str(reference["cases"])):
            pixels = mx.array(reference["values"][reference[f"{case}_codes"]])
            sizes = [(int(height), int(width)) for height, width in reference[f"{case}_sizes"]]
            names = [name for name in ("features", "deepstack") if f"{case}_{name}" in reference.files]
            yield pixels, sizes, {name: reference[f"{case}_{name}"] for name in names}


def distance(found: mx.array, expected: np.ndarray[Any, Any] | mx.array) -> float:
    """Return the largest difference, relative to the largest expected value."""
    theirs = np.array(expected)
    assert found.shape == theirs.shape
    return float(np.abs(np.array(found.astype(mx.float32)) - theirs).max() / np.abs(theirs).max())


def largest_error(tower: Tower, family: str) -> float:
    """Return the largest `distance` of features and deepstack from those of transformers."""
    found = []
    for pixels, sizes, expected in cases_of(family):
        encoded = tower.features(pixels, sizes)
        deepstack = expected.get("deepstack", ())
        assert len(encoded.deepstack) == len(deepstack)
        found += [distance(encoded.features, expected["features"])]
        found += [distance(own, theirs) for own, theirs in zip(encoded.deepstack, deepstack, strict=True)]
    return max(found)
