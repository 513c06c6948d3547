"""Images of one prompt: their pixels after pre-processing, and the rows that they take among the token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from math import isqrt
from typing import Any

import numpy as np

from ..util.dataclass import dataclass
from .processor import Layout, Pixels, Size
from .prompt import ImageRun, Positions, image_runs, rope_positions

_KEY_BIT = 1 << 62
"""Set in the key of every image row, so that none equals a token id."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image, ready for its tower."""

    pixels: Pixels
    digest: bytes
    """blake2b, 32 bytes, of everything in the image that its features depend on: bytes after resizing, layout and normalization."""

    @classmethod
    def of(cls, pixels: Pixels) -> ImageInput:
        """Return the input of these pixels."""
        layout, values = pixels.layout, np.ascontiguousarray(pixels.values)
        shape = (
            values.shape,
            pixels.channel_axis,
            pixels.frames,
            pixels.flat,
            layout.tiles,
            layout.pieces,
            layout.counts,
            layout.grid,
            pixels.tower,
        )
        found = blake2b(repr(shape).encode(), digest_size=32)
        found.update(pixels.table.tobytes())
        found.update(values.tobytes())
        return cls(pixels, found.digest())

    @property
    def layout(self) -> Layout:
        """The image's place in a prompt."""
        return self.pixels.layout

    def keys(self) -> array[int]:
        """Return a key of 63 bits for each image row: equal for equal rows of equal images, above all token ids."""
        words = np.frombuffer(self.digest, np.uint64).copy()
        rows = np.arange(1, self.layout.tokens + 1, dtype=np.uint64)
        # Multiplication by odd constants, as in splitmix64: every bit of the digest and of the row number counts.
        mixed = (words[0] + rows * np.uint64(0x9E3779B97F4A7C15)) ^ words[1]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + words[2]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB) ^ words[3]
        mixed ^= mixed >> np.uint64(31)
        return array("q", ((mixed & np.uint64(_KEY_BIT - 1)) | np.uint64(_KEY_BIT)).astype(np.int64).tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt. The samples of a request share one."""

    images: tuple[ImageInput, ...]
    """In the order of their placeholders."""
    runs: tuple[ImageRun, ...]
    """Image rows, ascending. An image has one or more runs."""
    keys: array[int]
    """Key of each token of the prompt for the prefix cache, int64: the token id of a text row."""
    rope: Positions | None = None
    """Rotary positions, int32 `[3, tokens]`, where these are not the index (M-RoPE); else None."""
    shift: int = 0
    """Rotary position minus index of every token after the prompt."""
    spans: tuple[tuple[int, int], ...] = ()
    """Index ranges [first, end) whose rows see one another, ascending, for models with such layers; else empty."""
    prepare_s: float = 0.0
    """Seconds of decoding and resizing; near 0 for images that were cached."""

    @classmethod
    def of(cls, ids: Sequence[int], images: Sequence[ImageInput], image_token_id: int, *, mrope: bool, spans: bool) -> PromptImages:
        """Find the rows of `images` among the token ids. Raises `PromptError` unless they fit.

        `mrope`: rotary positions have three axes. `spans`: the rows of an image see one another in some layers.
        """
        layouts = [image.layout for image in images]
        runs = image_runs(ids, image_token_id, layouts)
        keys, own = array("q", ids), [image.keys() for image in images]
        for run in runs:
            keys[run.start : run.start + run.count] = own[run.image][run.first : run.first + run.count]
        rope, shift = None, 0
        if mrope:
            rope, shift = rope_positions(len(ids), runs, [layout.grid or (1, layout.tokens) for layout in layouts])
        ranges = tuple((run.start, run.start + run.count) for run in runs) if spans else ()
        return cls(tuple(images), tuple(runs), keys, rope, shift, ranges)

    def followed_by(self, ids: Sequence[int]) -> PromptImages:
        """Return the images of the prompt that continues with these token ids of text."""
        rope = self.rope
        if rope is not None:
            positions = np.arange(len(self.keys), len(self.keys) + len(ids), dtype=np.int32) + np.int32(self.shift)
            rope = np.concatenate([rope, np.broadcast_to(positions, (3, len(ids)))], axis=1)
        return replace(self, keys=self.keys + array("q", ids), rope=rope)

    @property
    def sizes(self) -> tuple[tuple[Size, Size], ...]:
        """(width, height) of each picture, and of the image that the model sees."""
        layouts = [image.layout for image in self.images]
        return tuple(((each.size[1], each.size[0]), (each.resized[1], each.resized[0])) for each in layouts)

    @property
    def tokens(self) -> int:
        """Number of image rows."""
        return sum(run.count for run in self.runs)

    def grid(self, image: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the index among the tokens of each row of an image, int64 `[rows, columns]` over the resized image, without a thumbnail.

        Raises `ValueError` for tiles whose rows are no square.
        """
        runs = [run for run in self.runs if run.image == image]
        layout = self.images[image].layout
        places = np.concatenate([np.arange(run.start, run.start + run.count) for run in runs])
        if layout.grid is not None:
            return places.reshape(layout.grid)
        (rows, columns), pieces = layout.tiles, len(layout.pieces)
        count = layout.counts[0] if len(layout.counts) == pieces else layout.tokens // pieces
        side = isqrt(count)
        if side**2 != count:
            raise ValueError(f"a tile of {count} rows is no square")
        tiles: np.ndarray[Any, np.dtype[np.int64]] = places[: rows * columns * count].reshape(rows, columns, side, side)
        return np.reshape(tiles.transpose(0, 2, 1, 3), (rows * side, columns * side))
