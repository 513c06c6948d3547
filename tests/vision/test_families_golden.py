"""Prompts, token ids, pixels and positions of images equal those of transformers (tests/golden/vision)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.tokenizer.tokenizer import from_directory
from mlxinfer.vision.families import open_processor
from mlxinfer.vision.picture import read_picture
from mlxinfer.vision.processor import Layout
from mlxinfer.vision.prompt import expanded, image_runs, rope_positions

GOLDEN = Path(__file__).parents[1] / "golden" / "vision"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "tokenizer.json").is_file())


def _cases() -> list[tuple[str, str]]:
    found = []
    for family in FAMILIES:
        with np.load(GOLDEN / family / "reference.npz", allow_pickle=False) as reference:
            found += [(family, case) for case in json.loads(str(reference["cases"]))]
    return found


CASES = _cases()


def _case(family: str, case: str) -> dict[str, Any]:
    with np.load(GOLDEN / family / "reference.npz", allow_pickle=False) as reference:
        return {name.removeprefix(f"{case}_"): reference[name] for name in reference.files if name.startswith(f"{case}_")}


def _images(values: dict[str, Any]) -> list[Any]:
    return [values[name] for name in sorted(values) if name.startswith("image_") and name[6:].isdecimal()]


def _layouts(family: str, values: dict[str, Any]) -> list[Layout]:
    processor = open_processor(GOLDEN / family)
    return [processor.plan(image.shape[:2]) for image in _images(values)]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_prompt_and_ids(family: str, case: str) -> None:
    values, processor, tokenizer = _case(family, case), open_processor(GOLDEN / family), from_directory(GOLDEN / family)
    layouts, messages = _layouts(family, values), json.loads(str(values["messages"]))
    assert tokenizer.render_chat(messages) == str(values["prompt"])
    ids = tokenizer.encode_chat(messages, expand=lambda text: expanded(text, processor, layouts))
    assert ids == values["input_ids"].tolist()
    runs = image_runs(ids, processor.image_token_id, layouts)
    assert sum(run.count for run in runs) == sum(layout.tokens for layout in layouts) == ids.count(processor.image_token_id)
    for run in runs:
        assert set(ids[run.start : run.start + run.count]) == {processor.image_token_id}
    for image, layout in enumerate(layouts):
        mine = [run for run in runs if run.image == image]
        assert [run.first for run in mine] == np.cumsum([0, *layout.counts])[:-1].tolist()


@pytest.mark.parametrize(("family", "case"), [each for each in CASES if "pixels" in _case(*each)])
def test_pixels(family: str, case: str) -> None:
    values, processor = _case(family, case), open_processor(GOLDEN / family)
    found = [processor.pixels(read_picture(image)).normalized() for image in _images(values)]
    assert hashlib.sha256(b"".join(array.tobytes() for array in found)).hexdigest() == str(values["pixels"])


@pytest.mark.parametrize(("family", "case"), [each for each in CASES if "pixel_codes" in _case(*each)])
def test_pixels_of_families_without_a_pil_class(family: str, case: str) -> None:
    """The checkpoint's logits are those of these pixels, which tests/vision/test_families_transformers.py compares with torchvision's."""
    values, processor = _case(family, case), open_processor(GOLDEN / family)
    found = [processor.pixels(read_picture(image)).values.reshape(-1) for image in _images(values)]
    assert np.array_equal(np.concatenate(found), values["pixel_codes"])


@pytest.mark.parametrize(("family", "case"), [each for each in CASES if "position_ids" in _case(*each)])
def test_grids_and_rope_positions_of_qwen(family: str, case: str) -> None:
    values, processor = _case(family, case), open_processor(GOLDEN / family)
    layouts, ids = _layouts(family, values), values["input_ids"].tolist()
    grids = [layout.grid for layout in layouts if layout.grid]
    assert [[1, 2 * rows, 2 * columns] for rows, columns in grids] == values["image_grid_thw"].tolist()
    positions, delta = rope_positions(len(ids), image_runs(ids, processor.image_token_id, layouts), grids)
    assert np.array_equal(positions, values["position_ids"])
    assert [delta] == values["rope_delta"].tolist()


def test_rope_positions_of_text_are_indices() -> None:
    positions, delta = rope_positions(5, [], [])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


@pytest.mark.parametrize("family", ["mistral3", "ministral3"])
@pytest.mark.parametrize("case", ["one", "two", "turns"])
def test_sizes_of_mistral(family: str, case: str) -> None:
    values = _case(family, case)
    assert [list(layout.resized) for layout in _layouts(family, values)] == values["image_sizes"].tolist()
