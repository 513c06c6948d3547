"""InternVL in the form of transformers (`internvl`): a grid of square tiles of the closest aspect ratio, and a thumbnail.

Source: `GotOcr2ImageProcessorPil` with `crop_to_patches`, which `InternVLProcessor` always sets, of transformers 5.24. `Pixels.values` is
uint8 [tiles, 3, height, width], row by row; with several tiles, the last is a thumbnail of the whole picture.
"""

from __future__ import annotations

from ..processor import (
    CLIP_MEAN,
    CLIP_STD,
    Budget,
    Bytes,
    ImageProcessor,
    Layout,
    Normalization,
    Pixels,
    ProcessorFiles,
    Size,
    channels_first,
    closest_grid,
    cut,
)

_MOST_TILES = 1024


class InternVLProcessor(ImageProcessor):
    """`detail` low means one tile; `max_pixels` limits the number of tiles."""

    source = "GotOcr2ImageProcessorPil, InternVLProcessor"
    limits = frozenset({"max_pixels"})

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=3, mean=CLIP_MEAN, std=CLIP_STD)
        size = config.sizes("size", ("height", "width"), {"height": 384, "width": 384})
        if len(size) < 2:
            raise config.error("size", "has no height and width")
        self._tile: Size = size["height"], size["width"]
        config.boolean("crop_to_patches", True)
        self._least = config.integer("min_patches", 1, high=_MOST_TILES)
        self._most = config.integer("max_patches", 12, low=self._least, high=_MOST_TILES)
        self._count = files.prompt.integer("image_seq_length", 256)
        self.image_token = self.placeholder = files.token("context_image_token", "<IMG_CONTEXT>")
        self._begin, self._end = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")

    def layout(self, size: Size, budget: Budget) -> Layout:
        most = 1 if budget.detail == "low" else self._most
        if budget.max_pixels:
            most = max(1, min(most, budget.max_pixels // (self._tile[0] * self._tile[1])))
        least = min(self._least, most)
        # By number of tiles; of equal numbers, wider than high is last.
        grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1) if least <= rows * columns <= most]
        tiles = closest_grid(size, self._tile, sorted(grids, key=lambda grid: grid[0] * grid[1])) if most > 1 else (1, 1)
        number = tiles[0] * tiles[1]
        pieces = (self._tile,) * (number + 1 if number > 1 else 1)
        canvas = tiles[0] * self._tile[0], tiles[1] * self._tile[1]
        return Layout(size, (canvas,), tiles, pieces, (self._count * len(pieces),))

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        tiles = cut(self._normalization.resized(image, *layout.steps), layout.tiles)
        if len(tiles) > 1:
            tiles.append(self._normalization.resized(image, self._tile))
        return Pixels(layout, channels_first(tiles), self._normalization.table)

    def expansion(self, layout: Layout) -> str:
        return f"{self._begin}{self.image_token * layout.tokens}{self._end}"
