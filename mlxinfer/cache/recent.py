"""The newest rows of open pages, apart from these: a step of the GPU replaces a few rows, and not whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..records import dataclass

Spans = tuple[tuple[int, int, int], ...]
"""(slot, start, stop) of each entry: rows `start` to `stop` of the slot's open page."""


@dataclass(frozen=True, slots=True)
class RecentRows:
    """Rows that have not been written into their open pages yet."""

    spans: Spans = ()
    """Which rows they are, by entry."""
    arrays: tuple[mx.array, ...] = ()
    """Keys and values, `[entries, Hkv, rows, D]`: row i of an entry is row `start + i` of its page."""

    @property
    def length(self) -> int:
        """Rows that the arrays have for each entry, used or not."""
        return self.arrays[0].shape[2] if self.arrays else 0

    def written(self, pages: Sequence[mx.array]) -> list[mx.array]:
        """Open pages of keys and of values, `[slots, Hkv, 64, D]`, with these rows in them."""
        slots, rows, entries, places = _places(self.spans)
        written = []
        for page, recent in zip(pages, self.arrays, strict=True):
            heads = _heads(page.shape[1])
            new = mx.reshape(page, page.shape)  # another reference to the same array: assigning to it leaves `page` as it is
            new[slots, heads, rows] = recent[entries, heads, places]
            written.append(new)
        return written


@lru_cache(8)
def _places(spans: Spans) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """For each row: slot and row of the page, entry and row of the entry. Each int32 `[rows, 1]`."""
    each = [(slot, row, entry, row - start) for entry, (slot, start, stop) in enumerate(spans) for row in range(start, stop)]
    slots, rows, entries, places = (mx.array([[row[i]] for row in each], mx.int32) for i in range(4))
    return slots, rows, entries, places


@lru_cache(8)
def _heads(count: int) -> mx.array:
    return mx.array([list(range(count))], mx.int32)
