"""The second table of docs/models.md: one test for each golden checkpoint that sees images, and each feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache.base import GivenRows, Segment
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Logits
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.models.towers.tower import Encoded
from mlxinfer.sampling import sample_seed
from mlxinfer.types import SamplingParams
from mlxinfer.vision.inputs import ImageInput, PromptImages
from mlxinfer.vision.picture import read_picture

from ..engines.tiny_engine import run
from ..models.models_page import Table
from ..models.seeing import GOLDEN, Picture, cases, images_of, prompt_of, seeing
from ..oracles.plain_step import PlainCache, PlainStep

NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "tokenizer.json").is_file())
TABLE = Table(
    "python -m pytest tests/vision/table --write-vision-table", "<!-- end of the table of images -->\n", "sees", NAMES, lambda name: name
)
STRIDE = 5
"""Every how manieth logit `reference.npz` has."""
FILLER = [40, 73, 65, 82, 77]
"""Ids of text."""

Test = Callable[..., Any]


def sees(title: str, *, excused: dict[str, str] | None = None) -> Callable[[Test], Test]:
    """The test makes a column of the table with this title, one cell for each golden checkpoint. `excused` says why a family has none."""
    reasons = excused or {}

    def parametrized(test: Test) -> Test:
        names = [pytest.param(name, marks=pytest.mark.skip(reason=reasons[name])) if name in reasons else name for name in NAMES]
        return pytest.mark.sees(title)(pytest.mark.parametrize("name", names)(test))

    return parametrized


def limit(name: str, expected: np.ndarray) -> float:
    """Largest error of a logit: 1e-4 of the largest logit; 1e-3 in Gemma's wide heads."""
    return 1e-3 if name.startswith("gemma") else 1e-4 * float(np.abs(expected).max())


@cache
def array(name: str, key: str) -> np.ndarray | None:
    """An array of `reference.npz`; None if it has none of this name."""
    with np.load(GOLDEN / name / "reference.npz", allow_pickle=False) as reference:
        return reference[key] if key in reference.files else None


@dataclass(frozen=True)
class Prompt:
    """Token ids with images."""

    name: str
    ids: list[int]
    images: PromptImages

    def request(self, count: int = 16, index: int = 0, **params: Any) -> Sequence:
        """A request for `count` tokens; greedy unless `params` say otherwise."""
        settings = SamplingParams(**{"temperature": 0.0, **params})
        return Sequence(self.ids, settings, sample_seed(settings.seed or 0, index), len(self.ids) + count, index=index, images=self.images)

    def behind(self, count: int) -> Prompt:
        """The same after `count` tokens of text."""
        ids = [FILLER[i % len(FILLER)] for i in range(count)] + self.ids
        return Prompt(self.name, ids, images_of(ids, self.images.images, self.name))

    def up_to(self, end: int) -> Prompt:
        """The part before this index, which must not cut an image."""
        count = len({run.image for run in self.images.runs if run.start < end})
        ids = self.ids[:end]
        return Prompt(self.name, ids, images_of(ids, self.images.images[:count], self.name))

    def with_pictures(self, pictures: Many[Picture]) -> Prompt:
        """The same ids with other pictures."""
        processor = seeing(self.name).vision.processor
        inputs = [ImageInput.of(processor.pixels(read_picture(picture))) for picture in pictures]
        return Prompt(self.name, self.ids, images_of(self.ids, inputs, self.name))

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Rows [first, end) of each image, from its first run to its last."""
        runs = [[run for run in self.images.runs if run.image == image] for image in range(len(self.images.images))]
        return [(mine[0].start, mine[-1].start + mine[-1].count) for mine in runs]


@cache
def prompt(name: str, case: str) -> Prompt:
    """The prompt of a golden case with images."""
    found = cases(name)[case]
    ids, images = prompt_of(found.messages, found.pictures, name)
    assert images is not None
    return Prompt(name, ids, images)


def negative(picture: Picture) -> Picture:
    return np.ascontiguousarray(255 - picture)


def text_request(count: int = 12, start: int = 0, **params: Any) -> Sequence:
    ids = [FILLER[(i + start) % len(FILLER)] for i in range(23)]
    settings = SamplingParams(**{"temperature": 0.0, **params})
    return Sequence(ids, settings, sample_seed(settings.seed or 0, 0), len(ids) + count)


def logits_in(engine: Engine, asked: Prompt) -> np.ndarray:
    """Logits of all rows that the engine computes."""
    sequence = Sequence(asked.ids, SamplingParams(), 0, len(asked.ids), wants_logits=True, images=asked.images)
    engine.add(sequence)
    rows: list[mx.array] = []
    while not engine.idle:
        rows += [event.rows for event in engine.step() if isinstance(event, Logits) and event.sequence is sequence]
    return np.array(mx.concatenate(rows))


@cache
def _encoded(name: str, digest: bytes, image: ImageInput) -> Encoded:
    found = seeing(name)
    return found.vision.tower.features(mx.array(image.pixels.normalized()), image.layout.pieces)


def plain_logits(asked: Prompt) -> np.ndarray:
    """Logits of all rows, by one step of the model over a plain cache with masks."""
    model, images = seeing(asked.name).model, asked.images
    encoded = [_encoded(asked.name, image.digest, image) for image in images.images]
    rows = [row for run in images.runs for row in range(run.start, run.start + run.count)]
    parts = [(run, encoded[run.image]) for run in images.runs]
    own = [slice(run.first, run.first + run.count) for run in images.runs]
    features = mx.concatenate([each.features[part] for (_, each), part in zip(parts, own, strict=True)])
    layers = range(len(encoded[0].deepstack))
    deepstack = tuple(mx.concatenate([each.deepstack[k][part] for (_, each), part in zip(parts, own, strict=True)]) for k in layers)
    count = len(asked.ids)
    segment = Segment(0, 0, count, 0, count, shift=images.shift, rope=images.rope, spans=images.spans)
    step = PlainStep(PlainCache(model.layers), (segment,))
    step.given = GivenRows(mx.array(rows, mx.int32), features, deepstack)
    ids = mx.array([0 if row in set(rows) else token for row, token in enumerate(asked.ids)], mx.int32)
    return np.array(model.logits(model.hidden(ids, step)))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def answers(engine: Engine, *requests: Sequence) -> list[list[int]]:
    return run(engine, list(requests))


def messages_with_pictures(name: str, case: str) -> list[dict[str, Any]]:
    """The messages of a case as users give them."""
    found = cases(name)[case]
    pictures = iter(found.pictures)
    messages: list[dict[str, Any]] = json.loads(json.dumps(found.messages))
    for message in messages:
        message["content"] = [{**part, "image": next(pictures)} if part["type"] == "image" else part for part in message["content"]]
    return messages
