"""Vision towers give the features of transformers, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from support.models.towers import FAMILIES, GOLDEN, cases_of, config_of, distance, largest_error, load_tower, save_tower, tensors_of

from mlxinfer import kernels_cpu
from mlxinfer.models.towers import TOWERS, parts
from mlxinfer.nn.packing import arrays, settle


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_those_of_transformers(family: str) -> None:
    assert largest_error(load_tower(GOLDEN / family), family) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_features_in_bfloat16_are_near(family: str) -> None:
    tower = load_tower(GOLDEN / family, mx.bfloat16)
    assert largest_error(tower, family) < 3e-2
    pixels, sizes, _ = next(cases_of(family))
    assert tower.features(pixels, sizes).features.dtype == mx.bfloat16


def test_every_family_has_a_reference() -> None:
    assert {TOWERS[config_of(family)["model_type"]] for family in FAMILIES} == set(TOWERS.values())


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "gemma4"])
def test_bounded_scores_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cpu, "can_compute_towers", lambda: False)
    monkeypatch.setattr(parts, "_SCORES", 500)
    assert largest_error(load_tower(GOLDEN / family), family) < 2e-5


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "gemma4", "gemma4_unified", "lfm2_vl"])
def test_an_image_does_not_see_another(family: str) -> None:
    """Each image alone gives its rows of the features of both."""
    tower = load_tower(GOLDEN / family)
    pixels, sizes, _ = next(cases_of(family))
    both = tower.features(pixels, sizes)
    areas = [height * width for height, width in sizes]
    cut, rows = (length * areas[0] // sum(areas) for length in (pixels.shape[0], both.features.shape[0]))
    for own, start, stop in ((pixels[:cut], 0, rows), (pixels[cut:], rows, None)):
        alone = tower.features(own, sizes[:1] if start == 0 else sizes[1:])
        assert distance(alone.features, both.features[start:stop]) < 1e-5
        for found, theirs in zip(alone.deepstack, both.deepstack, strict=True):
            assert distance(found, theirs[start:stop]) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4", "lfm2_vl"])
def test_equal_sizes_are_a_batch(family: str) -> None:
    """The first image twice gives its rows twice."""
    tower = load_tower(GOLDEN / family)
    pixels, sizes, _ = next(cases_of(family))
    first = pixels[: pixels.shape[0] * sizes[0][0] * sizes[0][1] // sum(height * width for height, width in sizes)]
    once = tower.features(first, sizes[:1]).features
    twice = tower.features(mx.concatenate([first, first]), [sizes[0], sizes[0]]).features
    assert distance(twice, mx.concatenate([once, once])) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_can_be_evaluated_one_by_one(family: str) -> None:
    """A tower yields a row for each patch after each block, and its result does not depend on pauses."""
    tower, config = load_tower(GOLDEN / family), config_of(family)["vision_config"]
    pixels, sizes, _ = next(cases_of(family))
    stages, count, result = tower.stages(pixels, sizes), 0, None
    while result is None:
        try:
            mx.eval(next(stages))
            count += 1
        except StopIteration as end:
            result = end.value
    assert distance(result.features, tower.features(pixels, sizes).features) < 1e-6
    layers = config.get("num_hidden_layers", config.get("depth", 0))
    assert count % layers == 0 if layers else count == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_settled_like_a_text_model(family: str) -> None:
    """Packed products give the same features, and every tensor can be reached from the tower."""
    tower = load_tower(GOLDEN / family)
    stored = sum(tensor.size for tensor in tensors_of(family).values())
    assert sum(array.size for array in arrays(tower)) == stored
    settle(tower)
    assert largest_error(tower, family) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_operations(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests use the CPU kernels where they are built; here MLX computes norms, activations and attention."""
    monkeypatch.setattr(kernels_cpu, "can_compute_towers", lambda: False)
    assert largest_error(load_tower(GOLDEN / family), family) < 2e-5
    assert largest_error(load_tower(GOLDEN / family, mx.bfloat16), family) < 3e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_matrices_lose_nothing(family: str, tmp_path: Path) -> None:
    """Settled matrices in bfloat16 give float32 rows the features of the same numbers in float32."""
    pixels, sizes, _ = next(cases_of(family))
    features = []
    for name, dtype in (("narrow", mx.bfloat16), ("wide", mx.float32)):
        (tmp_path / name).mkdir()
        tensors = {key: tensor.astype(mx.bfloat16).astype(dtype) for key, tensor in tensors_of(family).items()}
        tower = load_tower(save_tower(tmp_path / name, config_of(family), tensors))
        settle(tower)
        features.append(tower.features(pixels, sizes).features)
    assert features[0].dtype == mx.float32
    assert distance(*features) < 1e-5
