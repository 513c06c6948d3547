"""What a prompt needs is read back from disk into the prefix index; see `spill.py` for the way there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from ..matching import Match
from ..prefix import Node, PrefixIndex, token_bytes
from .entries import Entries
from .pagefile import Entry
from .spill import Spill
from .tier import DiskTier
from .wanted import Wanted

_REMEMBERED = 1 << 16
"""Prompts for which there was nothing to read."""

_LEAST_S = 0.2
"""For what has been copied already."""

Request = tuple[str, int, int]


@dataclass(slots=True)
class _Fetch:
    request: Request
    leaf: Node
    missing: Counter[int]
    """Pages that have not arrived yet, by group."""


class PrefixesOnDisk:
    """Belongs to the thread that owns the cache, and has a `tier` of its own. `reserve(group, pages)` makes the pools of a group large
    enough for its pages, and for as many more."""

    def __init__(self, index: PrefixIndex, tier: DiskTier, entries: Entries, reserve: Callable[[int, int], None]) -> None:
        self._index = index
        self._tier = tier
        self._entries = entries
        self._reserve = reserve
        self._fetches: dict[Request, _Fetch] = {}
        self._done: set[Request] = set()
        self._spill = Spill(index, tier, entries)
        tier.opened(index.root_digest())

    @property
    def arrived(self) -> bool:
        """Whether `prefetch` would change the pools: then no step may be in flight."""
        return self._tier.arrived

    def prefetch(self, tokens: Sequence[int], adapter: str, *, store: bool) -> bool:
        """See `PagedCache.prefetch`."""
        if store:
            self._take_over()
        if self._tier.off:
            self._fetches.clear()
            return False
        data = token_bytes(tokens)
        request = adapter, len(data), hash(data)
        if request in self._fetches:
            return True
        if request in self._done:
            return False
        if not self._tier.opened(self._index.root_digest(adapter)):
            return True
        return self._start(request, Wanted(self._index, self._tier, self._entries, tokens, adapter), adapter)

    def wait(self, timeout_s: float) -> None:
        self._tier.wait(timeout_s)

    def used(self, match: Match) -> None:
        """A sequence was opened with this: what it needed stays longer, and what others wait for may have changed."""
        self._done.clear()
        if match.node is None:
            return
        root = match.node.chain()[0].digest
        if match.node.parent:
            for group in range(len(match.node.pages)):
                self._tier.mark_used(root, self._entries.page_name(match.node.digest, match.node.parent.digest, group))
        if match.snapshot:
            self._tier.mark_used(root, self._entries.snapshot_of(root, match.snapshot).file)

    def _start(self, request: Request, wanted: Wanted, adapter: str) -> bool:
        depth, batches = wanted.batches()
        if not batches:
            if len(self._done) >= _REMEMBERED:
                self._done.clear()
            self._done.add(request)
            return False
        leaf = self._index.root(adapter)
        for block in wanted.blocks(depth):
            leaf = self._index.child(leaf, block)
        missing = Counter(group for batch in batches for e in batch if (group := self._entries.group_of(e)) is not None)
        self._fetches[request] = fetch = _Fetch(request, leaf, missing)
        self._tier.read(batches, fetch)
        return True

    def _take_over(self) -> None:
        """One batch of what has arrived."""
        arrival = self._tier.take()
        if arrival is None:
            return
        if not arrival.entries:
            if isinstance(arrival.ticket, _Fetch):
                self._finish(arrival.ticket)
            return
        group = self._entries.group_of(arrival.entries[0])
        if group is None:
            self._put_snapshot(arrival.entries[0], arrival.data[0])
        else:
            # They arrive in the order in which they were asked for.
            fetch = next(iter(self._fetches.values()), None)
            self._put_pages(group, arrival.entries, arrival.data, fetch.missing[group] if fetch else 0)
            if fetch:
                fetch.missing[group] -= len(arrival.entries)

    def _finish(self, fetch: _Fetch) -> None:
        # An engine that had to start anew gets what the one before it asked for as well.
        if self._fetches.get(fetch.request) is fetch:
            del self._fetches[fetch.request]
            self._done.add(fetch.request)
        if self._index.node(fetch.leaf.digest) is fetch.leaf:
            self._index.refresh(fetch.leaf)

    def _put_pages(self, number: int, entries: list[Entry], data: np.ndarray, expected: int) -> None:
        group = self._index.groups[number]
        nodes = [self._index.node(entry.digest) for entry in entries]
        missing = [i for i, node in enumerate(nodes) if node is not None and node.pages[number] is None]
        if not missing or len(missing) > group.allocator.available or (group.first and not group.first.available):
            return
        depth = nodes[missing[0]].depth  # type: ignore[union-attr]
        pages = group.allocate(depth - 1, len(missing))
        self._reserve(number, max(expected - len(pages), 0))
        if len(missing) < len(entries):
            data = data[missing]
        self._entries.put(number, pages, entries, data)
        for i, page in zip(missing, pages, strict=True):
            # Making room may have taken away the node itself.
            node = self._index.node(entries[i].digest)
            if node is not None:
                self._index.put_page(node, number, page)
        group.release(pages[::-1])

    def _put_snapshot(self, entry: Entry, data: np.ndarray) -> None:
        node, tail = self._index.node(entry.parent), token_bytes(entry.tokens)
        if node is not None and self._index.covers(node, tail) is None:
            rows = self._entries.rows(entry, data)
            self._index.put_snapshot(node, tail, rows, rows.nbytes)

    def tidy(self, *, idle: bool = True) -> bool:
        """See `PagedCache.tidy`."""
        return self._spill.run(idle=idle)

    def close(self, timeout_s: float) -> None:
        """Write what waits, as far as that is done in this time, and end the use of the disk."""
        deadline = monotonic() + timeout_s
        self._spill.finish(deadline)
        self._tier.close(max(deadline - monotonic(), _LEAST_S))
