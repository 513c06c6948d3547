"""SmolVLM, SmolVLM2 and Idefics3: enlarged to a longest edge, cut into square tiles, with a thumbnail.

Source: `SmolVLMImageProcessorPil`, `Idefics3ImageProcessorPil` (the same code) and `SmolVLMProcessor` of transformers 5.24.
`Pixels.values` is uint8 [tiles, 3, tile, tile], row by row; with several tiles, the last is a thumbnail made from the enlarged image.
"""

from __future__ import annotations

import math
from math import isqrt
from typing import Any

from ...util.typed_reader import TypedReader
from ..processor import (
    HALF,
    Budget,
    Bytes,
    ImageProcessor,
    Layout,
    Normalization,
    Pixels,
    ProcessorFiles,
    Size,
    channels_first,
    cut,
)

_LARGEST = 4096
"""`MAX_IMAGE_SIZE` of transformers."""


class Idefics3Processor(ImageProcessor):
    """`detail` low means one tile and high several; `max_pixels` lowers the longest edge. Small pictures are always enlarged."""

    source = "SmolVLMImageProcessorPil, Idefics3ImageProcessorPil, SmolVLMProcessor, Idefics3Processor"
    limits = frozenset({"max_pixels"})

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=1, mean=HALF, std=HALF)
        self._longest = config.sizes("size", ("longest_edge",), {"longest_edge": 4 * 364}).get("longest_edge", 4 * 364)
        self._tile = config.sizes("max_image_size", ("longest_edge",), {"longest_edge": 364}).get("longest_edge", 364)
        self._splits = config.boolean("do_image_splitting", True)
        self._count = files.prompt.optional_integer("image_seq_len") or _rows_of_tile(files, files.image)
        self.image_token = self.placeholder = files.token("image_token", "<image>")
        self._fake = files.token("fake_image_token", "<fake_token_around_image>")
        self._global = files.token("global_image_token", "<global-img>")

    def layout(self, size: Size, budget: Budget) -> Layout:
        longest, tile = self._longest, self._tile
        if budget.max_pixels:
            longest = min(longest, max(tile, isqrt(budget.max_pixels) // tile * tile))
        first = _enlarged(size, longest)
        splits = budget.detail == "high" or (self._splits and budget.detail == "auto")
        second = _multiple(first, tile) if splits else (tile, tile)
        tiles = second[0] // tile, second[1] // tile
        number = tiles[0] * tiles[1]
        pieces = ((tile, tile),) * (number + 1 if number > 1 else 1)
        return Layout(size, (first, second), tiles, pieces, (self._count,) * len(pieces))

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        whole = self._normalization.resized(image, *layout.steps)
        tiles = cut(whole, layout.tiles)
        if len(tiles) > 1:
            tiles.append(self._normalization.resized(whole, (self._tile, self._tile)))
        return Pixels(layout, channels_first(tiles), self._normalization.table)

    def expansion(self, layout: Layout) -> str:
        rows = self.image_token * self._count
        whole = f"{self._fake}{self._global}{rows}{self._fake}"
        if len(layout.pieces) == 1:
            return whole
        lines = [
            "".join(f"{self._fake}<row_{r + 1}_col_{c + 1}>{rows}" for c in range(layout.tiles[1])) + "\n" for r in range(layout.tiles[0])
        ]
        return "".join(lines) + "\n" + whole


def _rows_of_tile(files: ProcessorFiles, config: TypedReader) -> int:
    """Return the image rows of a tile from the model's config, for checkpoints without `image_seq_len`."""
    vision: Any = files.model.get("vision_config")
    scale, found = files.model.get("scale_factor"), None
    if isinstance(vision, dict) and type(scale) is int and scale > 0:
        size, patch = vision.get("image_size"), vision.get("patch_size")
        if type(size) is int and type(patch) is int and size >= patch > 0:
            found = (size // patch) ** 2 // scale**2
    if not found:
        raise config.error("image_seq_len", "is missing in processor_config.json")
    return found


def _enlarged(size: Size, longest: int) -> Size:
    """Return (height, width) with this longest edge and an even other one: `get_resize_output_image_size`."""
    height, width = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LARGEST:
        width, height = _LARGEST, int(_LARGEST / ratio)
    elif height > width and height > _LARGEST:
        height, width = _LARGEST, int(_LARGEST * ratio)
    return max(height, 1), max(width, 1)


def _multiple(size: Size, tile: int) -> Size:
    """Return (height, width) rounded up to multiples of `tile`: `resize_for_vision_encoder`."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile
