"""Who attends to what in one step: the tiles of query rows and the table of pages, made on the host, for all layers of one window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

PAGE = 64
RAW = -(2**31)
"""Id of a page that is read raw, from the open page and the step's own rows."""

Segment = tuple[int, int, int, int, int, Sequence[int]]
"""`(slot, start, count, past, first_page, pages)`: rows `start .. start + count` are the tokens `past ..` of the sequence whose open
page is in `slot`, and whose pages `first_page ..` are sealed under the ids `pages`, up to the open one."""


class PrefillPlan:
    """Of `segments`; segments without rows are left out. `first16` says that first pages have a pool of their own.

    Raises ValueError for a segment that does not fit together: rows that overlap, a table that is too short or begins too late.
    """

    def __init__(self, segments: Sequence[Segment], *, window: int | None = None, first16: bool = False) -> None:
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens")
        self.segments = [s for s in segments if s[2]]
        self.window = window
        self.first16 = first16
        self.rows = 0
        for segment in segments:
            self._check(segment)
        self.count = sum(s[2] for s in self.segments)
        """Rows of all segments."""
        self.slots = 1 + max((s[0] for s in self.segments), default=-1)
        ids = [page for s in self.segments for page in s[5]]
        self.highest_page = max(ids, default=-1)
        self.highest_first = max((~page for page in ids), default=-1)
        self.filled = sum(self._filled(s) for s in self.segments)
        self._tiles: dict[int, mx.array] = {}
        self._tables: dict[int, mx.array] = {}

    def _check(self, segment: Segment) -> None:
        slot, start, count, past, first_page, pages = segment
        if min(slot, start, count, past, first_page) < 0:
            raise ValueError(f"a segment has a negative number: {segment[:5]}")
        if start < self.rows:
            raise ValueError(f"rows {start} to {start + count} overlap those of an earlier segment")
        self.rows = start + count if count else self.rows
        if not count:
            return
        if first_page + len(pages) != past // PAGE:
            raise ValueError(f"{past} tokens are past, but the table ends with page {first_page + len(pages)}")
        oldest = max(past - self.window + 1, 0) // PAGE if self.window else 0
        if first_page > max(oldest, 0) and first_page * PAGE < past:
            raise ValueError(f"the table begins with page {first_page}, and page {oldest} is still seen")
        if any(page < 0 and (i or first_page or not self.first16) for i, page in enumerate(pages)):
            raise ValueError("a page of the first pages' pool is not a first page")

    def _filled(self, segment: Segment) -> int:
        """Pages of this step that are sealed into the pool's form, which are all but a first page with a pool of its own."""
        _, _, count, past, _, _ = segment
        pages = (past + count) // PAGE - past // PAGE
        return pages - 1 if pages and past < PAGE and self.first16 else pages

    def tiles(self, size: int) -> mx.array:
        """int32 `[tiles, 8]` as the kernel's `Tile` has it, each of at most `size` rows of one page."""
        if size not in self._tiles:
            rows: list[list[int]] = []
            answers = 0
            for segment, table in zip(self.segments, self._starts(), strict=True):
                rows += _cut(segment, table, answers, size)
                answers += segment[2]
            self._tiles[size] = mx.array(rows, mx.int32)
        return self._tiles[size]

    def _starts(self) -> Iterator[int]:
        """Where the table has page 0 of each segment, which for a segment whose first pages are gone may be before the table."""
        place = 0
        for segment in self.segments:
            yield place - segment[4]
            place += self._entries(segment)

    @staticmethod
    def _entries(segment: Segment) -> int:
        """Pages of a segment that are full once the step is done."""
        _, _, count, past, first_page, _ = segment
        return (past + count) // PAGE - first_page

    def table(self, pool_pages: int, *, raw: bool) -> mx.array:
        """int32 ids: of a page of the pool as it is, of the first pages' pool `~place`, of one that this step fills
        `pool_pages + place`, or `RAW` if it is to be read raw."""
        key = -1 if raw else pool_pages
        if key not in self._tables:
            ids, place = [], pool_pages
            for segment in self.segments:
                fresh = self._entries(segment) - len(segment[5])
                sealed = 0 if raw else self._filled(segment)
                ids += [*segment[5], *[RAW] * (fresh - sealed), *range(place, place + sealed)]
                place += sealed
            self._tables[key] = mx.array(ids + [0] * max(8 - len(ids), 0), mx.int32)
        return self._tables[key]


def _cut(segment: Segment, table: int, answers: int, size: int) -> Iterator[list[int]]:
    slot, start, count, past, _, _ = segment
    done = 0
    while done < count:
        position = past + done
        rows = min(size, count - done, PAGE - position % PAGE)
        yield [start + done, rows, position, past, slot, table, answers + done, 0]
        done += rows
