"""Memory of images: the tower, its activations, cached features, and the largest image that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

import mlx.core as mx

from ... import kernels_cpu
from ...cache.attention.reference_chunks import FUSED_DIMS
from ...models.towers import Tower
from ...models.towers.parts import PatchAttention, VisionBlock
from ...nn.linear import Linear
from ...nn.packing import objects
from ...util.dataclass import dataclass
from ...util.device import is_gpu
from ...vision.picture import MAX_PIXELS
from ...vision.processor import DEFAULT_BUDGET, Budget, ImageProcessor, Layout
from ..vision import PreparedVision, Vision, image_budget

_FEATURES_SHARE, _MOST_FEATURES = 0.05, 10**9
"""Share of the memory for features that are kept, and its maximum in bytes."""
_STEP_SHARE = 0.25
"""Share of the memory besides the weights for one image in the tower."""
_CONTEXT_SHARE = 0.75
"""Maximum share of the context for the rows of one image."""
_PASS_PIXELS = {True: 1 << 20, False: 1 << 18}
"""Pixels of several tiles that go through the tower at once, by whether that is on a GPU."""
_PIXEL_COPIES = 3
"""Float32 pixels that are alive at once: looked up, repeated or reordered, and cast."""
_SCORES, _SCORE_COPIES = 1 << 24, 3
"""Maximum scores at once where attention is not fused (as in `towers.parts`), and copies: scores, softmax, one waiting to be freed."""
_SHRINK = 0.9
"""Ratio of the limits of pixels that are tried one after another."""
_RATIOS = (1.0, 4 / 3, 3 / 2, 16 / 9, 2.0, 5 / 2, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 20.0)
"""Ratios of the sides of pictures among which the largest image is searched, wide and high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Memory of images in bytes, and the largest image."""

    weights: int
    """Weights of the tower."""
    step: int
    """Peak while one image is encoded, in addition to everything that stays."""
    features: int
    """Features of images that are kept for later prompts."""
    max_pixels: int | None
    """Maximum pixels of an image after resizing, which requests cannot raise; None for the model's own limit."""
    pixels: int
    """Pixels of the largest image after resizing."""
    tokens: int
    """Rows of the largest image in the prompt."""
    limited: bool
    """True if memory or the context limits images below the model's own limit, or below the caller's."""

    @property
    def used(self) -> int:
        return self.weights + self.step + self.features

    def line(self) -> str:
        """Return a line about the largest image."""
        megapixels = f"{self.pixels / 1e6:.1f}" if self.pixels >= 10**6 else f"{self.pixels / 1e6:.2g}"
        return f"images up to {megapixels} megapixels ({self.tokens:,} tokens); larger ones are scaled down"

    def budget(self, min_pixels: int | None) -> Budget:
        """Return the limits of images for requests that name none."""
        least = min_pixels if self.max_pixels is None or min_pixels is None else min(min_pixels, self.max_pixels)
        return Budget(self.max_pixels, least) if self.max_pixels or least else DEFAULT_BUDGET


class ImageMemory:
    """Plans the memory of images of one model."""

    def __init__(self, vision: PreparedVision | Vision, max_pixels: int | None = None, min_pixels: int | None = None) -> None:
        """The arguments are those of `EngineArgs`. Raises `SettingError` for limits that the model cannot follow."""
        self._asked = image_budget(vision, max_pixels, min_pixels)
        self._processor, self._adjustable = vision.processor, "max_pixels" in vision.processor.limits
        self._size = TowerSize(vision.tower, vision.dtype)
        self.weights = vision.weight_bytes
        """Bytes of the tower's weights."""

    def span(self) -> int:
        """Return the rows of the longest run of an image, without limits of memory and unless a request asks for more detail."""
        return max(max(layout.counts) for layout in _largest(self._processor, self._asked))

    def plan(self, limit: int, room: int) -> ImagePlan:
        """Plan for `limit` bytes of memory, of which `room` are left besides weights."""
        share = int(max(room, 0) * _STEP_SHARE)
        return self._fitting(
            int(min(limit * _FEATURES_SHARE, _MOST_FEATURES)), lambda layout: self._size.bytes(layout) <= share, self._asked.max_pixels
        )

    def within(self, plan: ImagePlan, context: int, rows: int | None) -> ImagePlan:
        """Return the plan with images that fit in `context` tokens, and whose runs fit in `rows` rows of a step (None: may be divided)."""

        def fits(layout: Layout) -> bool:
            return layout.tokens <= context * _CONTEXT_SHARE and (rows is None or max(layout.counts) <= rows)

        found = self._fitting(plan.features, fits, plan.max_pixels)
        return replace(found, step=plan.step, limited=plan.limited or found.limited)

    def _fitting(self, features: int, fits: Callable[[Layout], bool], most: int | None) -> ImagePlan:
        """Return the plan with the largest images that fit, or with the smallest that the family has."""
        budget = Budget(most, self._asked.min_pixels, "high")
        layouts = _largest(self._processor, budget)
        own = max(map(_area, _largest(self._processor, self._asked)))
        while self._adjustable and not all(map(fits, layouts)):
            area = max(map(_area, layouts))
            smaller = int(min(area, budget.max_pixels or area) * _SHRINK)
            least = None if budget.min_pixels is None else min(budget.min_pixels, smaller)
            if smaller < 1:
                break
            budget = Budget(smaller, least, "high")
            shrunk = _largest(self._processor, budget)
            if smaller < min(map(_area, shrunk)) and max(map(_area, shrunk)) == area:
                break
            layouts = shrunk
        largest = max(layouts, key=lambda layout: layout.tokens)
        return ImagePlan(
            weights=self.weights,
            step=max(map(self._size.bytes, layouts)),
            features=features,
            max_pixels=budget.max_pixels,
            pixels=max(map(_area, layouts)),
            tokens=largest.tokens,
            limited=max(map(_area, layouts)) < own,
        )


def image_memory(vision: PreparedVision | Vision | str, max_pixels: int | None = None, min_pixels: int | None = None) -> ImageMemory | None:
    """Return the planner of images; None for a model that cannot see. Raises `SettingError` as `image_budget`."""
    if isinstance(vision, str):
        image_budget(vision, max_pixels, min_pixels)
        return None
    return ImageMemory(vision, max_pixels, min_pixels)


class TowerSize:
    """Sizes of a tower that its memory depends on."""

    def __init__(self, tower: Tower, dtype: mx.Dtype) -> None:
        nodes = list(objects(tower))
        blocks = [node for node in nodes if isinstance(node, VisionBlock)]
        self._patch, self._dtype = tower.patch, dtype
        self._numbers = max(map(_row_numbers, blocks), default=0)
        """Numbers per row that a block computes."""
        self._dims = {block.attention.dim for block in blocks}
        self._heads = max((_outputs(block.attention) // block.attention.dim for block in blocks), default=0)
        """Maximum number of heads."""
        self._widest = max((max(node.matrix.shape[-2:]) for node in nodes if isinstance(node, Linear)), default=0)
        self._copies = 2 + len(getattr(tower, "deepstack", ()))
        """Arrays of features, for deepstack layers too, and one waiting to be freed."""
        self._frames = int(getattr(getattr(tower, "sizes", None), "frames", 1))

    def bytes(self, layout: Layout) -> int:
        """Return the peak of the largest pass of an image through the tower, and the bytes of its features."""
        pieces = [height * width for height, width in layout.pieces]
        area = max(max(pieces), min(sum(pieces), _PASS_PIXELS[is_gpu()]))
        rows = area // self._patch**2 + 1
        pixels = _PIXEL_COPIES * 3 * area * mx.float32.size * self._frames
        features = layout.tokens * self._widest * self._copies
        return pixels + (rows * self._numbers + features) * self._dtype.size + self._score_bytes(rows)

    def _score_bytes(self, rows: int) -> int:
        """Return the bytes of scores where attention is not fused."""
        if not self._dims or (is_gpu() and self._dims <= FUSED_DIMS):
            return 0
        heads = 1 if kernels_cpu.in_use() else self._heads
        return _SCORE_COPIES * min(heads * rows**2, _SCORES) * mx.float32.size


def _outputs(attention: PatchAttention) -> int:
    """Return the most outputs of a product of attention: the channels of queries, perhaps with keys and values."""
    return max(node.matrix.shape[-2] for node in objects(attention) if isinstance(node, Linear))


def _row_numbers(block: VisionBlock) -> int:
    """Return the numbers per row in the inputs and outputs of a block's products."""
    return sum(sum(node.matrix.shape[-2:]) for node in objects(block) if isinstance(node, Linear))


def _largest(processor: ImageProcessor, budget: Budget) -> list[Layout]:
    """Return the layouts of the largest pictures, by their ratio of sides."""
    found = []
    for ratio in _RATIOS:
        short = isqrt(int(MAX_PIXELS / ratio))
        long = int(short * ratio)
        found += [processor.plan((short, long), budget), processor.plan((long, short), budget)]
    return found


def _area(layout: Layout) -> int:
    return layout.resized[0] * layout.resized[1]
