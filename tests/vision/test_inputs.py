"""Images of a prompt: keys of their rows, runs, positions and spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxinfer.errors import PromptError
from mlxinfer.vision.inputs import ImageInput, PromptImages
from mlxinfer.vision.processor import Layout, Pixels

IMAGE = 7
TABLE = np.zeros((3, 256), np.float32)


def image(seed: int = 0, *, grid: tuple[int, int] = (2, 3), counts: tuple[int, ...] = (6,), **changes: Any) -> ImageInput:
    values = np.random.default_rng(seed).integers(0, 256, (1, 3, 8, 12), np.uint8)
    layout = Layout((8, 12), ((8, 12),), (1, 1), ((8, 12),), counts, grid)
    return ImageInput.of(Pixels(**{"layout": layout, "values": values, "table": TABLE, **changes}))


def test_equal_images_have_equal_keys_and_no_key_is_a_token() -> None:
    one, two = image(), image()
    assert one.digest == two.digest
    assert one.keys() == two.keys()
    assert len(set(one.keys())) == 6
    assert min(one.keys()) >= 1 << 62


@pytest.mark.parametrize(
    "other",
    [image(1), image(grid=(3, 2)), image(counts=(3, 3)), image(table=TABLE + 1), image(frames=2), image(flat=True), image(tower="b")],
    ids=["pixels", "grid", "runs", "normalization", "frames", "form", "tower"],
)
def test_whatever_features_depend_on_changes_all_keys(other: ImageInput) -> None:
    assert not set(image().keys()) & set(other.keys())


def test_one_pixel_changes_all_keys() -> None:
    values = np.zeros((1, 3, 8, 12), np.uint8)
    changed = values.copy()
    changed[0, 2, 7, 11] = 1
    assert not set(image(values=values).keys()) & set(image(values=changed).keys())


def test_rows_positions_and_spans_of_two_images() -> None:
    ids = [1, 2, *[IMAGE] * 6, 3, *[IMAGE] * 6, 4]
    found = PromptImages.of(ids, [image(), image(1)], IMAGE, mrope=True, spans=True)
    assert [(run.start, run.count, run.image, run.first) for run in found.runs] == [(2, 6, 0, 0), (9, 6, 1, 0)]
    assert found.tokens == 12
    assert found.spans == ((2, 8), (9, 15))
    assert list(found.keys[:2]) == [1, 2]
    assert found.keys[2:8] == image().keys()
    assert found.keys[9:15] == image(1).keys()
    assert found.rope is not None
    assert found.rope[:, -1].tolist() == [9, 9, 9]
    assert found.shift == 9 - 15


def test_runs_of_one_image_share_its_keys() -> None:
    ids = [1, *[IMAGE] * 3, 2, *[IMAGE] * 3, 3]
    found = PromptImages.of(ids, [image(counts=(3, 3))], IMAGE, mrope=False, spans=False)
    assert found.keys[1:4] + found.keys[5:8] == image(counts=(3, 3)).keys()
    assert found.rope is None
    assert found.shift == 0
    assert found.spans == ()


def test_rows_without_their_image_are_refused() -> None:
    with pytest.raises(PromptError, match="does not fit"):
        PromptImages.of([1, IMAGE, IMAGE], [image()], IMAGE, mrope=False, spans=False)
