"""LFM2-VL: any size within a number of rows; larger pictures become a grid of tiles with a thumbnail.

Source: `Lfm2VlImageProcessor` and `Lfm2VlProcessor` of transformers 5.24, without its padding. That class resizes with torchvision, from
which Pillow differs by two levels of 255 at most where pictures are not enlarged much. `Pixels.values` is uint8
[patches, patch, patch, 3]: the patches of each piece, row by row, one piece after another. `normalized` is float32
[patches, patch * patch * 3].
"""

from __future__ import annotations

import math

import numpy as np

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
    closest_grid,
    cut,
    patches,
)

_MOST_TILES = 1024


class Lfm2VLProcessor(ImageProcessor):
    """`detail` low means no tiles. `max_pixels` limits tiles and rows, and `min_pixels` raises the least number of rows."""

    source = "Lfm2VlImageProcessor, Lfm2VlProcessor"
    limits_ratio = True
    unused = frozenset({"size"})

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=2, mean=HALF, std=HALF)
        self._patch, self._factor = config.integer("encoder_patch_size", 16), config.integer("downsample_factor", 2)
        self._splits = config.boolean("do_image_splitting", True)
        self._least_tiles = config.integer("min_tiles", 2, high=_MOST_TILES)
        self._most_tiles = config.integer("max_tiles", 10, low=self._least_tiles, high=_MOST_TILES)
        if self._splits and self._least_tiles == 1 < self._most_tiles:
            raise config.bad("min_tiles", 1, "at least 2, or equal to max_tiles")
        self._splits = self._splits and self._most_tiles > 1
        self._thumbnail = config.boolean("use_thumbnail", True)
        self._least, self._most = config.integer("min_image_tokens", 64), config.integer("max_image_tokens", 256)
        self._tile, self._tolerance = config.integer("tile_size", 512), config.positive("max_pixels_tolerance", 2.0)
        files.prompt.must_be("use_image_special_tokens", True)
        self.image_token = self.placeholder = files.token("image_token", "<image>")
        self._begin, self._end = files.token("image_start_token", "<|image_start|>"), files.token("image_end_token", "<|image_end|>")
        self._whole = files.token("image_thumbnail_token", "<|img_thumbnail|>")

    def layout(self, size: Size, budget: Budget) -> Layout:
        unit = self._patch * self._factor
        least, most, tiles = self._least, self._most, self._most_tiles
        if budget.max_pixels:
            most, tiles = min(most, max(1, budget.max_pixels // unit**2)), min(tiles, budget.max_pixels // self._tile**2)
        if budget.min_pixels:
            least = max(least, math.ceil(budget.min_pixels / unit**2))
        whole = self._whole_size(size, unit, min(least, most), most)
        if budget.detail == "low" or not self._splits or tiles < self._least_tiles or not self._is_large(size, unit):
            return Layout(size, (whole,), (1, 1), (whole,), (self._rows(whole),), (whole[0] // unit, whole[1] // unit))
        grid = closest_grid(size, (self._tile, self._tile), _grids(self._least_tiles, tiles))
        canvas, tile = (grid[0] * self._tile, grid[1] * self._tile), (self._tile, self._tile)
        pieces = (tile,) * (grid[0] * grid[1]) + ((whole,) if self._thumbnail else ())
        return Layout(size, (canvas,), grid, pieces, tuple(map(self._rows, pieces)))

    def _rows(self, piece: Size) -> int:
        """Return the image rows of a tile or of the whole image."""
        return math.prod(math.ceil(side // self._patch / self._factor) for side in piece)

    def _is_large(self, size: Size, unit: int) -> bool:
        height, width = (max(self._patch, round(side / unit) * unit) for side in size)
        return height * width > self._most * unit**2 * self._tolerance

    @staticmethod
    def _whole_size(size: Size, unit: int, least: int, most: int) -> Size:
        """Return the (height, width) of the untiled image: `smart_resize` (lfm2_vl)."""
        height, width = size
        new_height, new_width = (max(unit, round(side / unit) * unit) for side in size)
        if new_height * new_width > most * unit**2:
            beta = math.sqrt((height * width) / (most * unit**2))
            new_height, new_width = (max(unit, math.floor(side / beta / unit) * unit) for side in size)
        elif new_height * new_width < least * unit**2:
            beta = math.sqrt(least * unit**2 / (height * width))
            new_height, new_width = (math.ceil(side * beta / unit) * unit for side in size)
        return new_height, new_width

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        pieces = cut(self._normalization.resized(image, *layout.steps), layout.tiles)
        if len(layout.pieces) > len(pieces):
            pieces.append(self._normalization.resized(image, layout.pieces[-1]))
        values = np.concatenate([patches(piece, self._patch) for piece in pieces])
        return Pixels(layout, values, self._normalization.table, channel_axis=-1, flat=True)

    def expansion(self, layout: Layout) -> str:
        if layout.tiles == (1, 1):
            return f"{self._begin}{self.image_token * layout.tokens}{self._end}"
        places = [(row, column) for row in range(1, layout.tiles[0] + 1) for column in range(1, layout.tiles[1] + 1)]
        names = [f"<|img_row_{row}_col_{column}|>" for row, column in places] + [self._whole]
        runs = "".join(name + self.image_token * count for name, count in zip(names, layout.counts, strict=False))
        return f"{self._begin}{runs}{self._end}"


def _grids(least: int, most: int) -> list[Size]:
    """Return (rows, columns) by number of tiles. The order among equal numbers is that of a set, as in transformers."""
    found = {(w, h) for n in range(least, most + 1) for w in range(1, n + 1) for h in range(1, n + 1) if least <= w * h <= most}
    return [(rows, columns) for columns, rows in sorted(found, key=lambda grid: grid[0] * grid[1])]
