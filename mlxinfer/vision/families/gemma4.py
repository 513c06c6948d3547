"""Gemma 4: the aspect ratio is kept, and the image has at most 70, 140, 280, 560 or 1120 rows. Smaller pictures are enlarged.

Source: `Gemma4ImageProcessorPil` and `Gemma4Processor` of transformers 5.24, without its padding. `Pixels.values` is uint8
[patches, patch, patch, 3], row by row; a pool of 3 x 3 patches becomes an image row. `normalized` is float32
[patches, patch * patch * 3] of 0 to 1; the model itself computes 2(x - 0.5). In the 12B model (`gemma4_unified`,
`Gemma4UnifiedImageProcessor`) patches are already as large as a pool. That class uses torchvision, from which Pillow differs by two
levels of 255 at most where pictures are not enlarged much.
"""

from __future__ import annotations

import math

from ...errors import ImageError
from ..processor import Budget, Bytes, ImageProcessor, Layout, Normalization, Pixels, ProcessorFiles, Size, patches

_BUDGETS = (70, 140, 280, 560, 1120)


class Gemma4Processor(ImageProcessor):
    """`detail` low means 70 rows and high 1120. `max_pixels` and `min_pixels` choose the nearest budget within them."""

    source = "Gemma4ImageProcessorPil, Gemma4Processor"
    unused = frozenset({"size"})
    merges_patches = False

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=3, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        self._patch = config.integer("patch_size", 16)
        self.pool = config.integer("pooling_kernel_size", 3)
        """Patches along each side of an image row."""
        self._count = config.integer("max_soft_tokens", 280)
        if self._count not in _BUDGETS:
            raise config.bad("max_soft_tokens", self._count, f"one of {', '.join(map(str, _BUDGETS))}")
        self.image_token = self.placeholder = files.token("image_token", "<|image|>")
        self._begin, self._end = files.token("boi_token", "<|image>"), files.token("eoi_token", "<image|>")

    def _rows(self, budget: Budget) -> int:
        """Return the maximum number of image rows."""
        unit = (self._patch * self.pool) ** 2
        count = {"low": _BUDGETS[0], "high": _BUDGETS[-1], "auto": self._count}[budget.detail]
        if budget.min_pixels:
            count = next((each for each in _BUDGETS if each >= count and each * unit >= budget.min_pixels), _BUDGETS[-1])
        if budget.max_pixels:
            count = max((each for each in _BUDGETS if each <= count and each * unit <= budget.max_pixels), default=_BUDGETS[0])
        return count

    def layout(self, size: Size, budget: Budget) -> Layout:
        side = self._patch * self.pool
        resized = _size_within(size, side, self._rows(budget))
        grid = resized[0] // side, resized[1] // side
        return Layout(size, (resized,), (1, 1), (resized,), (grid[0] * grid[1],), grid)

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        resized = self._normalization.resized(image, *layout.steps)
        values = patches(resized, self._patch * self.pool if self.merges_patches else self._patch)
        return Pixels(layout, values, self._normalization.table, channel_axis=-1, flat=True)

    def expansion(self, layout: Layout) -> str:
        return f"{self._begin}{self.image_token * layout.tokens}{self._end}"


class Gemma4UnifiedProcessor(Gemma4Processor):
    """The 12B model, whose patches are image rows."""

    source = "Gemma4UnifiedImageProcessor, Gemma4UnifiedProcessor"
    merges_patches = True


def _size_within(size: Size, side: int, count: int) -> Size:
    """Return the largest (height, width) in multiples of `side` with at most `count` of its squares: `get_aspect_ratio_preserving_size`."""
    height, width = size
    factor = math.sqrt(count * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if rows == 0:
        rows, columns = 1, min(math.floor(width / height), count)
    elif columns == 0:
        rows, columns = min(math.floor(height / width), count), 1
    if rows * columns == 0 or rows * columns > count:
        raise ImageError(f"the image has {width} x {height} pixels: its sides differ too much; crop it")
    return rows * side, columns * side
