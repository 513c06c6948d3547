"""Which page belongs to whom: bookkeeping on the host, without MLX.

A sequence's history in one layer group is a run of sealed pages (`PageTable`) followed by its open page. Pages are
counted references: sequences that share a prefix share its sealed pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

PAGE = 64
"""Tokens in a page."""


class PageAllocator:
    """Hands out page ids below `capacity`, lowest first, so that a lone sequence gets a contiguous run."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._fresh = 0
        self._returned: list[int] = []
        self._references: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self.capacity - len(self._references)

    @property
    def extent(self) -> int:
        """One more than the highest id ever handed out: the pages that storage must have room for."""
        return self._fresh

    def allocate(self, count: int) -> list[int]:
        """`count` new pages with one reference each. The scheduler reserves before it runs: running out is our bug."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        ids = []
        for _ in range(count):
            if self._returned:
                page = heapq.heappop(self._returned)
            else:
                page, self._fresh = self._fresh, self._fresh + 1
            self._references[page] = 1
            ids.append(page)
        return ids

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                heapq.heappush(self._returned, page)


@dataclass(slots=True)
class PageTable:
    """The sealed pages of one sequence in one layer group: page `first + i` of its history is stored in `pages[i]`.

    Pages below `first` have left the group's window and are gone.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens that are sealed, those out of the window included."""
        return (self.first + len(self.pages)) * PAGE

    def drop_before(self, position: int) -> list[int]:
        """Forget the pages whose every token lies before `position`; returns their ids."""
        count = min(max(position // PAGE - self.first, 0), len(self.pages))
        dropped, self.pages = self.pages[:count], self.pages[count:]
        self.first += count
        return dropped

    def from_position(self, position: int) -> tuple[int, list[int]]:
        """The pages that hold `position` and everything sealed after it, and the position of their first token."""
        skip = min(max(position // PAGE - self.first, 0), len(self.pages))
        return (self.first + skip) * PAGE, self.pages[skip:]


class AttentionGroup:
    """The layers of one window: they hold the same pages, so they share allocators and each sequence's table.

    Where first pages have a pool of their own (`first`), the id of one in a table is `~place` in that pool.
    """

    def __init__(self, window: int | None, capacity: int, *, first: bool = False) -> None:
        self.window = window
        self.allocator = PageAllocator(capacity)
        self.first = PageAllocator(capacity) if first else None
        self.layers: list[int] = []
        self.tables: dict[int, PageTable] = {}

    def extend(self, table: PageTable, count: int) -> list[int]:
        """`count` new pages at the end of a table; returns their ids."""
        ids: list[int] = []
        if self.first and count and not table.end:
            ids = [~page for page in self.first.allocate(1)]
        ids += self.allocator.allocate(count - len(ids))
        table.pages.extend(ids)
        return ids

    def share(self, pages: list[int]) -> None:
        for allocator, ids in self._owners(pages):
            allocator.share(ids)

    def release(self, pages: list[int]) -> None:
        for allocator, ids in self._owners(pages):
            allocator.release(ids)

    def _owners(self, pages: list[int]) -> Iterator[tuple[PageAllocator, list[int]]]:
        yield self.allocator, [page for page in pages if page >= 0]
        if self.first:
            yield self.first, [~page for page in pages if page < 0]


def pages_for(tokens: int, window: int | None, chunk: int) -> int:
    """The most sealed pages that a sequence of `tokens` tokens holds at once in a group, computed in chunks of `chunk`."""
    sealed = tokens // PAGE
    if window is None:
        return sealed
    return min(sealed, (window + chunk) // PAGE + 2)
