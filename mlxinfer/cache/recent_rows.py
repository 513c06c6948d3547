"""Newest rows of open pages, stored separately so that a GPU step replaces a few rows instead of whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..util.dataclass import dataclass

_FEW = 2
"""Maximum entries written with one launch each; writing all together takes two launches and copies the rows twice."""

Spans = tuple[tuple[int, int, int], ...]
"""(slot, start, stop) of each entry: rows `start` to `stop` of the slot's open page."""


@dataclass(frozen=True, slots=True)
class RecentRows:
    """Rows that are not yet written to their open pages."""

    spans: Spans = ()
    arrays: tuple[mx.array, ...] = ()
    """Keys and values, `[entries, Hkv, rows, D]`: row i of an entry is row `start + i` of its page."""

    @property
    def length(self) -> int:
        """Number of rows per entry in the arrays, used or not."""
        return self.arrays[0].shape[2] if self.arrays else 0

    def written(self, pages: Sequence[mx.array]) -> list[mx.array]:
        """Return open pages of keys and values, `[slots, Hkv, 64, D]`, with the rows written."""
        if len(self.spans) <= _FEW:
            return [self._written_each(page, recent) for page, recent in zip(pages, self.arrays, strict=True)]
        slots, rows, entries, places = _places(self.spans)
        written = []
        for page, recent in zip(pages, self.arrays, strict=True):
            heads = _heads(page.shape[1])
            new = mx.reshape(page, page.shape)  # a new reference, so that assignment does not change `page`
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
    """Return slot and row of the page, and entry and row of the entry, for each row: int32 `[rows, 1]` each."""
    each = [(slot, row, entry, row - start) for entry, (slot, start, stop) in enumerate(spans) for row in range(start, stop)]
    slots, rows, entries, places = (mx.array([[row[i]] for row in each], mx.int32) for i in range(4))
    return slots, rows, entries, places


@lru_cache(8)
def _heads(count: int) -> mx.array:
    return mx.array([list(range(count))], mx.int32)
