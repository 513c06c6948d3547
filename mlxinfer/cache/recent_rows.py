"""The newest rows of open pages, apart from these: a step of the GPU replaces a few rows, and not whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..util.dataclass import dataclass

_FEW = 2
"""Entries that are written one by one, with a launch each: all at once take two, and copy the rows twice."""

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
        if len(self.spans) <= _FEW:
            return [self._written_each(page, recent) for page, recent in zip(pages, self.arrays, strict=True)]
        slots, rows, entries, places = _places(self.spans)
        written = []
        for page, recent in zip(pages, self.arrays, strict=True):
            heads = _heads(page.shape[1])
            new = mx.reshape(page, page.shape)  # another reference to the same array: assigning to it leaves `page` as it is
            new[slots, heads, rows] = recent[entries, heads, places]
            written.append(new)
        return written

    def _written_each(self, page: mx.array, recent: mx.array) -> mx.array:
        new = mx.reshape(page, page.shape)
        for entry, (slot, start, stop) in enumerate(self.spans):
            if start < stop:
                new[slot, :, start:stop] = recent[entry, :, : stop - start]
        return new


@lru_cache(8)
def _places(spans: Spans) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """For each row: slot and row of the page, entry and row of the entry. Each int32 `[rows, 1]`."""
    each = [(slot, row, entry, row - start) for entry, (slot, start, stop) in enumerate(spans) for row in range(start, stop)]
    slots, rows, entries, places = (mx.array([[row[i]] for row in each], mx.int32) for i in range(4))
    return slots, rows, entries, places


@lru_cache(8)
def _heads(count: int) -> mx.array:
    return mx.array([list(range(count))], mx.int32)
