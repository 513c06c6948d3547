"""Gemma 3: one square of a fixed size, without keeping the aspect ratio. Pan-and-scan, off by default, is not supported.

Source: `Gemma3ImageProcessorPil` and `Gemma3Processor` of transformers 5.24. `Pixels.values` is uint8 [1, 3, height, width].
"""

from __future__ import annotations

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
    square_grid,
)


class Gemma3Processor(ImageProcessor):
    """Every image has the same size, so only `detail` is accepted, and it changes nothing."""

    source = "Gemma3ImageProcessorPil, Gemma3Processor"
    limits = frozenset()
    unused = frozenset({"pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"})

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=2, mean=HALF, std=HALF)
        config.must_be("do_pan_and_scan", False)
        size = config.sizes("size", ("height", "width"), {"height": 224, "width": 224})
        if len(size) < 2:
            raise config.error("size", "has no height and width")
        self._size: Size = size["height"], size["width"]
        self._count = files.prompt.integer("image_seq_length", 256)
        self.image_token = files.token("image_token", "<image_soft_token>")
        self.placeholder = files.token("boi_token", "<start_of_image>")
        self._end = files.token("eoi_token", "<end_of_image>")

    def layout(self, size: Size, budget: Budget) -> Layout:
        return Layout(size, (self._size,), (1, 1), (self._size,), (self._count,), square_grid(self._count))

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        return Pixels(layout, channels_first([self._normalization.resized(image, *layout.steps)]), self._normalization.table)

    def expansion(self, layout: Layout) -> str:
        return f"\n\n{self.placeholder}{self.image_token * layout.tokens}{self._end}\n\n"
