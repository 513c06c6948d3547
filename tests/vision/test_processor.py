"""Settings of checkpoints, limits of the resolution, and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.errors import CheckpointError, ImageError, SettingError, UnsupportedModelError
from mlxinfer.vision.families import PROCESSORS, open_processor
from mlxinfer.vision.picture import read_picture
from mlxinfer.vision.processor import Budget, ImageProcessor, closest_grid

QWEN = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
SMOL = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
MISTRAL = {"size": {"longest_edge": 1540}}
MISTRAL_PROMPT = {"patch_size": 14, "spatial_merge_size": 2}
INTERN = {"size": {"height": 448, "width": 448}}


def opened(folder: Path, kind: str, image: dict[str, Any], prompt: dict[str, Any] | None = None, *, nested: bool = False) -> ImageProcessor:
    """The processor of a model directory with these files."""
    prompt, image = {"image_seq_len": 64, **(prompt or {})}, {"do_resize": True, **image}
    files = {
        "processor_config.json": {**prompt, "image_processor": image} if nested else prompt,
        "config.json": {"model_type": kind, "image_token_id": 9},
    }
    if not nested:
        files["preprocessor_config.json"] = image
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return open_processor(folder)


@pytest.mark.parametrize("nested", [False, True])
def test_both_places_of_the_settings(tmp_path: Path, nested: bool) -> None:
    processor = opened(tmp_path, "qwen3_vl", QWEN, nested=nested)
    assert processor.plan((1080, 1920)).tokens == 2040
    assert processor.image_token_id == 9


def test_families_without_a_processor_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'mllama', only for gemma3, "):
        opened(tmp_path, "mllama", {})
    with pytest.raises(UnsupportedModelError, match="model_type None"):
        open_processor(tmp_path / "nothing")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm", "image_token_id": 5}')
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        open_processor(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "preprocessor_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
            open_processor(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm"}')
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": true}')
    with pytest.raises(CheckpointError, match="has no image_token_id"):
        open_processor(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("qwen3_vl", {"do_resize": False}, "do_resize is false, which is not supported"),
        ("qwen3_vl", {"do_rescale": False}, "do_rescale is false"),
        ("qwen3_vl", {"do_center_crop": True}, "do_center_crop is true"),
        ("qwen3_vl", {"do_flip_channel_order": True}, "do_flip_channel_order is True"),
        ("qwen3_vl", {"image_mean": [0.5]}, "image_mean is"),
        ("qwen3_vl", {"image_std": [0.5, 0, 1]}, "image_std has a zero"),
        ("qwen3_vl", {"resample": 9}, "resample is 9"),
        ("qwen3_vl", {"patch_size": "16"}, "patch_size is '16'"),
        ("qwen3_vl", {"size": {"height": 5}}, "size.height is 5, must not be set"),
        ("qwen3_vl", {"size": [1, 2]}, "size is"),
        ("qwen3_vl", {"tile_size": 4}, "tile_size is 4, which is not supported for this family"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
        ("gemma3", {"size": {"height": 5}}, "size has no height and width"),
        ("gemma4", {"max_soft_tokens": 100}, "max_soft_tokens is 100, must be one of 70, 140"),
        ("lfm2_vl", {"min_tiles": 1}, "min_tiles is 1"),
        ("lfm2_vl", {"min_tiles": 5, "max_tiles": 4}, "max_tiles is 4"),
        ("smolvlm", {"max_image_size": {"longest_edge": 0}}, "longest_edge is 0"),
        ("internvl", {"max_patches": 10**9}, "max_patches is"),
    ],
)
def test_settings_that_would_change_pixels_are_refused(tmp_path: Path, kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path, kind, settings)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_unknown_and_harmless_settings_are_ignored(tmp_path: Path, kind: str) -> None:
    more = {
        "processor_class": "X",
        "do_convert_rgb": None,
        "do_pad": True,
        "device": None,
        "do_reduce_labels": False,
        "novel": 3,
        "image_mean": None,
    }
    processor = opened(tmp_path, kind, more)
    assert processor.ignored_keys == ("novel",)
    assert processor.plan((300, 500)).tokens > 0
    assert processor.source


def test_rows_of_a_tile_without_image_seq_len(tmp_path: Path) -> None:
    config = {"model_type": "idefics3", "image_token_id": 1, "scale_factor": 2, "vision_config": {"image_size": 364, "patch_size": 14}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SMOL))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(open_processor(tmp_path).plan((100, 100)).counts) == {169}
    (tmp_path / "config.json").write_text(json.dumps({**config, "scale_factor": None}))
    with pytest.raises(UnsupportedModelError, match="image_seq_len is missing"):
        open_processor(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"max_pixels": 0},
        {"min_pixels": -1},
        {"max_pixels": 1.5},
        {"max_pixels": True},
        {"detail": "fine"},
        {"max_pixels": 5, "min_pixels": 6},
    ],
)
def test_invalid_budgets(values: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        Budget(**values)


@pytest.mark.parametrize(
    ("kind", "settings", "prompt", "budget", "tokens"),
    [
        ("qwen3_vl", QWEN, {}, Budget(), 1024),
        ("qwen3_vl", QWEN, {}, Budget(detail="low"), 256),
        ("qwen3_vl", QWEN, {}, Budget(detail="high"), 1024),
        ("qwen3_vl", QWEN, {}, Budget(max_pixels=65536), 64),
        ("qwen3_vl", QWEN, {}, Budget(max_pixels=1), 1),
        ("qwen3_vl", QWEN, {}, Budget(min_pixels=2048 * 2048), 4096),
        ("smolvlm", SMOL, {}, Budget(), 17 * 64),
        ("smolvlm", SMOL, {}, Budget(detail="low"), 64),
        ("smolvlm", {**SMOL, "do_image_splitting": False}, {}, Budget(), 64),
        ("smolvlm", {**SMOL, "do_image_splitting": False}, {}, Budget(detail="high"), 17 * 64),
        ("smolvlm", SMOL, {}, Budget(max_pixels=1024 * 1024), 5 * 64),
        ("smolvlm", SMOL, {}, Budget(max_pixels=1), 64),
        ("mistral3", MISTRAL, MISTRAL_PROMPT, Budget(), 37 * 37),
        ("mistral3", MISTRAL, MISTRAL_PROMPT, Budget(detail="low"), 18 * 18),
        ("mistral3", MISTRAL, MISTRAL_PROMPT, Budget(max_pixels=1), 1),
        ("mistral3", MISTRAL, MISTRAL_PROMPT, Budget(min_pixels=1400 * 1400), 50 * 50),
        ("gemma3", {}, {}, Budget(detail="high"), 256),
        ("gemma4", {}, {}, Budget(), 256),
        ("gemma4", {}, {}, Budget(detail="low"), 64),
        ("gemma4", {}, {}, Budget(detail="high"), 33 * 33),
        ("gemma4", {}, {}, Budget(max_pixels=140 * 48 * 48), 11 * 11),
        ("gemma4", {}, {}, Budget(min_pixels=300 * 48 * 48), 23 * 23),
        ("internvl", INTERN, {}, Budget(), 10 * 256),
        ("internvl", INTERN, {}, Budget(detail="low"), 256),
        ("internvl", INTERN, {}, Budget(max_pixels=5 * 448 * 448), 5 * 256),
        ("lfm2_vl", {}, {}, Budget(), 4 * 256 + 256),
        ("lfm2_vl", {}, {}, Budget(detail="low"), 256),
        ("lfm2_vl", {}, {}, Budget(max_pixels=512 * 512), 256),
        ("lfm2_vl", {}, {}, Budget(max_pixels=256 * 256), 64),
    ],
)
def test_budgets(tmp_path: Path, kind: str, settings: dict[str, Any], prompt: dict[str, Any], budget: Budget, tokens: int) -> None:
    processor = opened(tmp_path, kind, settings, prompt)
    layout = processor.plan((1024, 1024), budget)
    assert layout.tokens == tokens
    assert processor.expansion(layout).count(processor.image_token) == tokens
    if budget.max_pixels and budget.max_pixels > 1:
        assert layout.resized[0] * layout.resized[1] <= budget.max_pixels
    assert processor.pixels(read_picture(np.zeros((1024, 1024, 3), np.uint8)), budget).layout == layout


@pytest.mark.parametrize(
    ("kind", "name"), [("gemma3", "max_pixels"), ("gemma3", "min_pixels"), ("smolvlm", "min_pixels"), ("internvl", "min_pixels")]
)
def test_limits_that_a_family_cannot_follow(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(SettingError, match=f"{name} does not apply"):
        opened(tmp_path, kind, {}).plan((100, 100), Budget(**{name: 1000}))


def test_lost_resolution_is_reported(tmp_path: Path) -> None:
    processor = opened(tmp_path, "qwen3_vl", QWEN)
    layout = processor.plan((3000, 4000), Budget(max_pixels=1 << 20))
    assert layout.scaled_down
    assert layout.note() == "an image of 4000 x 3000 pixels is scaled down to 1152 x 864 (972 tokens)"
    assert processor.plan((64, 64)).note() is None


@pytest.mark.parametrize("kind", ["qwen3_vl", "lfm2_vl", "gemma4"])
def test_sides_that_differ_too_much(tmp_path: Path, kind: str) -> None:
    processor = opened(tmp_path, kind, {})
    if kind != "gemma4":
        with pytest.raises(ImageError, match="one side is more than 200 times the other"):
            processor.plan((1, 201))
    assert processor.plan((2, 400)).tokens > 0
    with pytest.raises(ImageError, match="empty"):
        processor.plan((0, 5))


@pytest.mark.parametrize("kind", PROCESSORS)
def test_one_pixel(tmp_path: Path, kind: str) -> None:
    processor = opened(tmp_path, kind, {})
    found = processor.pixels(read_picture(np.full((1, 1, 3), 200, np.uint8)))
    assert found.layout.tokens > 0
    assert np.unique(found.values).tolist() == [200]
    assert sum(height * width for height, width in found.layout.pieces) * 3 == found.values.size


def test_the_last_of_equal_grids_is_taken_for_large_pictures() -> None:
    grids = [(1, 1), (2, 2), (3, 3)]
    assert closest_grid((100, 100), (448, 448), grids) == (1, 1)
    assert closest_grid((800, 800), (448, 448), grids) == (2, 2)
    assert closest_grid((2000, 2000), (448, 448), grids) == (3, 3)
