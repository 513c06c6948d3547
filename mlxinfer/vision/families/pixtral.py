"""Mistral Small 3.1 and later, Ministral 3: any size in units of merged patches, within a longest edge.

Source: `PixtralImageProcessorPil` and `PixtralProcessor` of transformers 5.24, whose units are patch size times merge size. `Pixels.values`
is uint8 [1, 3, height, width]. Each row of the grid is a run of its own: a break token ends it, and an end token ends the last.
"""

from __future__ import annotations

import math

from ..processor import (
    CLIP_MEAN,
    CLIP_STD,
    LOW_PIXELS,
    Budget,
    Bytes,
    ImageProcessor,
    Layout,
    Normalization,
    Pixels,
    ProcessorFiles,
    Size,
    channels_first,
)


class PixtralProcessor(ImageProcessor):
    """`max_pixels` lowers the area further; `min_pixels` enlarges smaller pictures."""

    source = "PixtralImageProcessorPil, PixtralProcessor"

    def read(self, files: ProcessorFiles) -> None:
        config, prompt = files.image, files.prompt
        self._normalization = Normalization.read(config, resample=3, mean=CLIP_MEAN, std=CLIP_STD)
        size = config.sizes("size", ("longest_edge", "height", "width"), {"longest_edge": 1024})
        longest = size.get("longest_edge")
        if longest is None and ("height" not in size or "width" not in size):
            raise config.error("size", "has no longest_edge")
        self._most: Size = (longest, longest) if longest else (size["height"], size["width"])
        config.take("patch_size")  # replaced by the processor's own, as in `PixtralProcessor._process_images`
        self._unit = prompt.integer("patch_size", 16) * prompt.integer("spatial_merge_size", 1)
        self.image_token = self.placeholder = prompt.text("image_token", "[IMG]")
        self._break, self._end = prompt.text("image_break_token", "[IMG_BREAK]"), prompt.text("image_end_token", "[IMG_END]")

    def layout(self, size: Size, budget: Budget) -> Layout:
        height, width = size
        most = min(budget.max_pixels or LOW_PIXELS, LOW_PIXELS) if budget.detail == "low" else budget.max_pixels
        if budget.min_pixels and height * width < budget.min_pixels:
            factor = math.sqrt(budget.min_pixels / (height * width))
            height, width = math.ceil(height * factor), math.ceil(width * factor)
        ratio = max(height / self._most[0], width / self._most[1])
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        rows, columns = (height - 1) // self._unit + 1, (width - 1) // self._unit + 1
        if most and rows * columns * self._unit**2 > most:
            beta = math.sqrt(height * width / most) * self._unit
            rows, columns = max(1, math.floor(height / beta)), max(1, math.floor(width / beta))
        resized = rows * self._unit, columns * self._unit
        return Layout(size, (resized,), (1, 1), (resized,), (columns,) * rows, (rows, columns))

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        return Pixels(layout, channels_first([self._normalization.resized(image, *layout.steps)]), self._normalization.table)

    def expansion(self, layout: Layout) -> str:
        return self._break.join(self.image_token * count for count in layout.counts) + self._end
