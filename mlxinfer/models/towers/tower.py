"""Interface of vision towers, and readers of their configs and names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..config_reader import IGNORED_KEYS, ConfigReader

Size = tuple[int, int]
"""(height, width) in pixels, or (rows, columns)."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Image rows as the text model takes them."""

    features: mx.array
    """`[tokens, text hidden]` in the tower's dtype. They replace embeddings, without the text model's embedding scale."""
    deepstack: tuple[mx.array, ...] = ()
    """Array k, `[tokens, text hidden]`, is added to image rows after layer k of the text model (Qwen3-VL)."""


Stages = Generator[mx.array, None, Encoded]
"""Yields the residual stream after each block, and returns the image rows."""
PartStages = Generator[mx.array, None, mx.array]
"""Yields the residual stream after each block, and returns an array."""


class Tower(ABC):
    """A vision tower with its projector.

    `pixels` are normalized float32 values. Families of tiles take `[pieces, 3, height, width]` of one size. Families of patches take
    `[patches, values]`, the patches of all pieces one after another in the order of the family's image processor. A piece is a whole
    image or a tile of one, and `sizes` is the (height, width) in pixels of each. Rows of the result are in the order of the pieces.
    """

    patch: int
    """Side of a patch in pixels; a patch is a row of the blocks."""

    @abstractmethod
    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        """Encode pieces block by block. A caller that evaluates what is yielded can pause between blocks. Nothing is evaluated here."""

    @property
    def added_layers(self) -> int:
        """Number of arrays in `Encoded.deepstack`."""
        return 0

    def features(self, pixels: mx.array, sizes: Sequence[Size]) -> Encoded:
        """Encode pieces without pauses; the caller evaluates the result."""
        stages = self.stages(pixels, sizes)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                return cast(Encoded, end.value)


class VisionReader(ConfigReader):
    """Strict reader of `vision_config`."""

    def __init__(self, config: Mapping[str, Any], *model_types: str) -> None:
        passed = {IGNORED_KEYS: config[IGNORED_KEYS]} if IGNORED_KEYS in config else {}
        super().__init__({**config["vision_config"], **passed})
        self.only("model_type", *model_types)

    def error(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"config.json: vision_config.{key} {what}")

    def side(self, key: str, default: int) -> int:
        """Read the side of a square, a number or two equal ones."""
        value = self.take(key, default)
        if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        if type(value) is not int or not 1 <= value <= 1 << 16:
            raise self.bad(key, value, "the side of a square")
        return value

    def rope_theta(self, default: float) -> float:
        """Read the base of the rotary angles, at the top level or in `rope_parameters`."""
        theta = self.number("rope_theta", default)
        given = self.take("rope_parameters")
        if given is None:
            return theta
        if not isinstance(given, Mapping):
            raise self.bad("rope_parameters", given, "an object")
        inner = ConfigReader(given)
        inner.only("rope_type", "default", "axial")
        theta = inner.number("rope_theta", theta)
        inner.finish()
        return theta


def text_config_of(config: Mapping[str, Any]) -> ConfigReader:
    """Return a reader of the text model's settings; in a flat config (qwen2_5_vl) they are at the top level."""
    for key in ("text_config", "llm_config"):
        if isinstance(inner := config.get(key), Mapping):
            return ConfigReader(inner)
    return ConfigReader(config)


def prefix_of(weights: Weights, witness: str, *prefixes: str) -> str:
    """Return the first prefix with which the checkpoint has the tensor `witness`; without any, the first of all."""
    return next((prefix for prefix in prefixes if weights.has(prefix + witness)), prefixes[0])


def runs_of(sizes: Sequence[Size]) -> list[tuple[Size, int]]:
    """Return each run of equal sizes with its length."""
    return [(size, len(list(run))) for size, run in groupby(sizes)]
