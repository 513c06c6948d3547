"""Assignment of pages to sequences: bookkeeping on the host, without MLX.

A sequence's history in one layer group is a run of sealed pages (`PageTable`) and an open page. Pages are reference-counted: sequences with
a common prefix share its sealed pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from ..util.dataclass import dataclass

PAGE = 64
"""Tokens per page."""


class PageAllocator:
    """Allocates page ids below `capacity`, lowest first, so that a single sequence gets a contiguous run.

    A page has users (counted sequences), or is in the prefix cache, or both. A cached page without users is `idle`; at most `most_idle`
    pages are. `allocate` evicts idle pages, least recently used first, by `reclaim(count)`, which must `forget` at least `count` pages.
    """

    def __init__(self, capacity: int, *, most_idle: int | None = None) -> None:
        self.capacity = capacity
        self.most_idle = capacity if most_idle is None else most_idle
        self.reclaim: Callable[[int], None] | None = None
        self.idle: dict[int, None] = {}
        """Idle pages, least recently used first."""
        self._fresh = 0
        self._returned: list[int] = []
        self._users: dict[int, int] = {}
        self._kept: set[int] = set()

    @property
    def free(self) -> int:
        """Number of pages that `allocate` can return without eviction."""
        return self.capacity - len(self._users) - len(self.idle)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can return."""
        return self.capacity - len(self._users)

    @property
    def used(self) -> int:
        """Number of pages with users."""
        return len(self._users)

    @property
    def extent(self) -> int:
        """Highest id ever allocated plus one: the pages that storage must hold."""
        return self._fresh

    def in_use(self, page: int) -> bool:
        return page in self._users

    def allocate(self, count: int) -> list[int]:
        """Return `count` new pages with one user each. The scheduler checks first, so running out is a bug."""
        if count > self.free and self.reclaim is not None:
            self.reclaim(count - self.free)
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        ids = []
        for _ in range(count):
            if self._returned:
                page = heapq.heappop(self._returned)
            else:
                page, self._fresh = self._fresh, self._fresh + 1
            self._users[page] = 1
            ids.append(page)
        return ids

    def reach(self, pages: Sequence[int]) -> None:
        """Record ids that another process allocated, for which storage is needed."""
        self._fresh = max(self._fresh, *(page + 1 for page in pages), 0)

    def share(self, pages: Sequence[int]) -> None:
        """Add one user to each page, idle or not."""
        for page in pages:
            if page in self.idle:
                del self.idle[page]
                self._users[page] = 0
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each page. Unused cached pages become idle, others free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._kept:
                    self.idle[page] = None
                else:
                    heapq.heappush(self._returned, page)
        if len(self.idle) > self.most_idle and self.reclaim is not None:
            self.reclaim(len(self.idle) - self.most_idle)

    def keep(self, page: int) -> None:
        """Mark a page as cached, so that it outlives its last user."""
        assert page in self._users
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Undo `keep`."""
        self._kept.remove(page)
        if page in self.idle:
            del self.idle[page]
            heapq.heappush(self._returned, page)


@dataclass(slots=True)
class PageTable:
    """Sealed pages of a sequence in one layer group: `pages[i]` is page `first + i` of its history."""

    first: int = 0
    """Number of the first page; earlier ones have left the window."""
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Number of sealed tokens, including those outside the window."""
        return (self.first + len(self.pages)) * PAGE

    def drop_before(self, position: int) -> list[int]:
        """Drop pages entirely before `position` and return their ids."""
        count = min(max(position // PAGE - self.first, 0), len(self.pages))
        dropped, self.pages = self.pages[:count], self.pages[count:]
        self.first += count
        return dropped

    def from_position(self, position: int) -> tuple[int, list[int]]:
        """Return (first position of the page with `position`, ids from that page)."""
        skip = min(max(position // PAGE - self.first, 0), len(self.pages))
        return (self.first + skip) * PAGE, self.pages[skip:]


class AttentionGroup:
    """Layers with one window size, which share allocators and each sequence's table.

    With a separate pool of first pages (`first`), such a page is `~place` in a table.
    """

    def __init__(self, window: int | None, capacity: int, *, first: bool = False, most_idle: int | None = None) -> None:
        self.window = window
        self.allocator = PageAllocator(capacity, most_idle=most_idle)
        self.first = PageAllocator(capacity, most_idle=most_idle) if first else None
        self.layers: list[int] = []
        self.tables: dict[int, PageTable] = {}

    @property
    def allocators(self) -> list[PageAllocator]:
        return [self.allocator, *([self.first] if self.first else [])]

    def oldest(self, position: int) -> int:
        """Return the first page to which the token at `position` attends."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // PAGE

    def allocate(self, start: int, count: int) -> list[int]:
        """Return `count` new pages; the first one is page `start` of its sequence."""
        ids: list[int] = []
        if self.first and count and not start:
            ids = [~page for page in self.first.allocate(1)]
        return ids + self.allocator.allocate(count - len(ids))

    def extend(self, table: PageTable, count: int) -> list[int]:
        """Append `count` new pages to a table and return their ids."""
        ids = self.allocate(table.end // PAGE, count)
        table.pages.extend(ids)
        return ids

    def share(self, pages: Sequence[int]) -> None:
        """Add one user to each page of a table."""
        for allocator, ids in self.owners(pages):
            allocator.share(ids)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each page of a table."""
        for allocator, ids in self.owners(pages):
            allocator.release(ids)

    def owner(self, page: int) -> tuple[PageAllocator, int]:
        """Return (allocator, id there) of a page in a table."""
        if page >= 0:
            return self.allocator, page
        assert self.first
        return self.first, ~page

    def owners(self, pages: Sequence[int]) -> Iterator[tuple[PageAllocator, list[int]]]:
        """Yield each allocator with its ids among a table's pages."""
        yield self.allocator, [page for page in pages if page >= 0]
        if self.first:
            yield self.first, [~page for page in pages if page < 0]


def pages_for(tokens: int, window: int | None, chunk: int) -> int:
    """Return the maximum of sealed pages of a sequence of `tokens` tokens in a group, computed in chunks of `chunk` tokens."""
    sealed = tokens // PAGE
    if window is None:
        return sealed
    return min(sealed, (window + chunk) // PAGE + 2)
