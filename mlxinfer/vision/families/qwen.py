"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: any size in units of merged patches, within limits of the area.

Source: `Qwen2VLImageProcessorPil` and `Qwen3VLProcessor` of transformers 5.24. `Pixels.values` is uint8 [patches, 3, patch, patch]. The
patches of a merged block follow one another, and blocks go row by row. `normalized` is float32 [patches, 3 * frames * patch * patch].
"""

from __future__ import annotations

import math

import numpy as np

from ..processor import CLIP_MEAN, CLIP_STD, LOW_PIXELS, Budget, Bytes, ImageProcessor, Layout, Normalization, Pixels, ProcessorFiles, Size


class QwenProcessor(ImageProcessor):
    """`max_pixels` and `min_pixels` replace the checkpoint's limits of the area."""

    source = "Qwen2VLImageProcessorPil, Qwen2VLProcessor, Qwen3VLProcessor"
    limits_ratio = True

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=3, mean=CLIP_MEAN, std=CLIP_STD)
        self._patch = config.integer("patch_size", 14)
        self.merge = config.integer("merge_size", 2)
        """Patches along each side of an image row."""
        self._frames = config.integer("temporal_patch_size", 2)
        size = config.sizes("size", ("shortest_edge", "longest_edge", "min_pixels", "max_pixels"), {})
        least = size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
        most = size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
        self._least, self._most = config.integer("min_pixels", least), config.integer("max_pixels", most)
        self.image_token = self.placeholder = files.token("image_token", "<|image_pad|>")

    def layout(self, size: Size, budget: Budget) -> Layout:
        most = budget.max_pixels or self._most
        most = min(most, LOW_PIXELS) if budget.detail == "low" else most
        least = min(budget.min_pixels or self._least, most)
        resized = _smart_resize(size, self._patch * self.merge, least, most)
        grid = resized[0] // self._patch // self.merge, resized[1] // self._patch // self.merge
        return Layout(size, (resized,), (1, 1), (resized,), (grid[0] * grid[1],), grid)

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        (height, width), patch, merge = layout.resized, self._patch, self.merge
        resized = self._normalization.resized(image, layout.resized)
        split = resized.reshape(height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3)
        values = np.ascontiguousarray(split.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, patch, patch)
        return Pixels(layout, values, self._normalization.table, frames=self._frames, flat=True)

    def expansion(self, layout: Layout) -> str:
        return self.image_token * layout.tokens


def _smart_resize(size: Size, unit: int, least: int, most: int) -> Size:
    """Return the nearest (height, width) in multiples of `unit` whose area is between `least` and `most`: `smart_resize` (qwen2_vl)."""
    height, width = size
    new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
    if new_height * new_width > most:
        beta = math.sqrt((height * width) / most)
        new_height = max(unit, math.floor(height / beta / unit) * unit)
        new_width = max(unit, math.floor(width / beta / unit) * unit)
    elif new_height * new_width < least:
        beta = math.sqrt(least / (height * width))
        new_height = math.ceil(height * beta / unit) * unit
        new_width = math.ceil(width * beta / unit) * unit
    return max(new_height, unit), max(new_width, unit)
