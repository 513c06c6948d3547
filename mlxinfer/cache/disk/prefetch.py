"""Prefetches a prompt's pages from disk or another machine into the prefix index; `write_back.py` is the other direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..pages import PAGE, AttentionGroup
from ..prefix_match import Match, find
from ..prefix_tree import BLOCK, ITEM, Node, PrefixIndex, token_bytes
from .backend import PageSource
from .layout import CacheLayout, snapshot_name, tail_length
from .pagefile import Entry

_BATCH = 8 << 20
"""Maximum bytes stored per call, which takes a few milliseconds."""

Goal = tuple[int, int, "bytes | None"]
"""(position, number of full pages, tail of the needed snapshot on disk or None)."""


class PrefetchPlan:
    """Determines the files to read for one prompt."""

    def __init__(self, index: PrefixIndex, storage: PageSource, layout: CacheLayout, tokens: Sequence[int], cache_salt: str) -> None:
        self._index = index
        self._storage = storage
        self._layout = layout
        self._data = token_bytes(tokens)
        self._limit = len(tokens) - 1
        self.root = index.root_digest(cache_salt)
        self._digests = [self.root, *index.digests(tokens, cache_salt)]
        self._reused = find(index, tokens, cache_salt).reused
        self._runs = self._all_runs()

    def batches(self) -> tuple[int, list[list[Entry]]]:
        """Return (number of full pages of the goal, batches to read in order); empty without any gain."""
        for position, depth, tail in self._goals():
            if position <= self._reused:
                break
            if self._complete(position, depth) and self._fits(position, depth):
                return depth, self._missing(position, depth, tail)
        return 0, []

    def blocks(self, depth: int) -> Iterator[bytes]:
        """Yield the tokens of the nodes down to a depth."""
        for start in range(0, depth * BLOCK, BLOCK):
            yield self._data[start : start + BLOCK]

    def _goals(self) -> Iterator[Goal]:
        """Yield candidate positions to resume, longest first, before pages are checked."""
        for depth in range(len(self._digests) - 1, -1, -1):
            if depth * PAGE > self._limit:
                continue
            for tail in sorted(self._tails(depth), key=len, reverse=True):
                position = depth * PAGE + len(tail) // ITEM
                if position <= self._limit or not self._index.exact:
                    yield min(position, self._limit), depth, tail
            if not self._index.exact:
                yield depth * PAGE, depth, None

    def _tails(self, depth: int) -> Iterator[bytes]:
        """Yield the tails of snapshots after a node that fully match the prompt."""
        digest = self._digests[depth]
        for name in self._storage.behind(self.root, digest):
            count = tail_length(name)
            if count is not None:
                tail = self._data[depth * BLOCK : depth * BLOCK + count * ITEM]
                if count < PAGE and snapshot_name(digest, tail) == name:
                    yield tail

    def _all_runs(self) -> list[list[int]]:
        """Return the number of consecutive pages in memory or on disk, by depth and group."""
        runs = [[0] * len(self._index.groups)]
        for depth in range(1, len(self._digests)):
            there = [self._in_memory(depth, g) or self._on_disk(depth, g) for g in range(len(self._index.groups))]
            runs.append([run + 1 if is_there else 0 for run, is_there in zip(runs[-1], there, strict=True)])
        return runs

    def _in_memory(self, depth: int, group: int) -> bool:
        node = self._index.node(self._digests[depth])
        return node is not None and node.pages[group] is not None

    def _on_disk(self, depth: int, group: int) -> bool:
        name = self._layout.page_name(self._digests[depth], self._digests[depth - 1], group)
        return self._storage.has(self.root, name)

    def _complete(self, position: int, depth: int) -> bool:
        return all(run >= depth - g.oldest(position) for g, run in zip(self._index.groups, self._runs[depth], strict=True))

    def _fits(self, position: int, depth: int) -> bool:
        """Return True if all pages of the goal fit in memory beside those of running sequences."""
        for number, group in enumerate(self._index.groups):
            wanted = [d for d in range(group.oldest(position) + 1, depth + 1) if not self._in_use(d, number, group)]
            allocator = group.allocator
            if len(wanted) > min(allocator.available, allocator.most_idle) or (group.first and not group.first.available):
                return False
        return True

    def _in_use(self, depth: int, number: int, group: AttentionGroup) -> bool:
        node = self._index.node(self._digests[depth])
        page = node.pages[number] if node else None
        if page is None:
            return False
        allocator, place = group.owner(page)
        return allocator.in_use(place)

    def _missing(self, position: int, depth: int, tail: bytes | None) -> list[list[Entry]]:
        batches: list[list[Entry]] = []
        for number, group in enumerate(self._index.groups):
            depths = [d for d in range(group.oldest(position) + 1, depth + 1) if not self._in_memory(d, number)]
            for d in depths:
                digests, block = (self._digests[d - 1], self._digests[d]), self._data[(d - 1) * BLOCK : d * BLOCK]
                entry = self._layout.page(self.root, digests, block, d, number)
                if not batches or not _joins(batches[-1], entry):
                    batches.append([])
                batches[-1].append(entry)
        if tail is not None:
            batches.append([self._layout.snapshot(self.root, self._digests[depth], tail)])
        return batches


def _joins(batch: list[Entry], entry: Entry) -> bool:
    """Return True if an entry follows the batch's last one with the same layout."""
    last = batch[-1]
    fits = (len(batch) + 1) * entry.layout.nbytes <= _BATCH
    return fits and last.layout is entry.layout and last.digest == entry.parent


_REMEMBERED = 1 << 16
"""Maximum prompts recorded as having nothing to read."""

Request = tuple[str, int, int]


@dataclass(slots=True)
class _Fetch:
    request: Request
    leaf: Node
    missing: Counter[int]
    """Number of missing pages by group."""


class PrefixPrefetcher:
    """Reads pages of prompts from a `storage` into the prefix index. Belongs to the cache's thread.

    `reserve(group, pages)` grows a group's pools for its pages in use and `pages` more.
    """

    def __init__(self, index: PrefixIndex, storage: PageSource, layout: CacheLayout, reserve: Callable[[int, int], None]) -> None:
        self._index = index
        self._storage = storage
        self._layout = layout
        self._reserve = reserve
        self._fetches: dict[Request, _Fetch] = {}
        self._done: set[Request] = set()
        storage.opened(index.root_digest())

    def prefetch(self, tokens: Sequence[int], cache_salt: str, *, store: bool) -> bool:
        """See `PagedCache.prefetch`."""
        if store:
            self.take_over()
        if self._storage.off:
            self._fetches.clear()
            return False
        data = token_bytes(tokens)
        request = cache_salt, len(data), hash(data)
        if request in self._fetches:
            return True
        if request in self._done:
            return False
        if not self._storage.opened(self._index.root_digest(cache_salt), tokens, lambda: find(self._index, tokens, cache_salt).reused):
            return True
        return self._start(request, PrefetchPlan(self._index, self._storage, self._layout, tokens, cache_salt), cache_salt)

    def used(self, match: Match) -> None:
        """Record that a sequence was opened with this match.

        Its files become recently used, and prompts without anything to read are searched again.
        """
        self._done.clear()
        if match.node is None:
            return
        root = match.node.chain()[0].digest
        if match.node.parent:
            for group in range(len(match.node.pages)):
                self._storage.mark_used(root, self._layout.page_name(match.node.digest, match.node.parent.digest, group))
        if match.snapshot:
            self._storage.mark_used(root, self._layout.snapshot_of(root, match.snapshot).file)

    def _start(self, request: Request, wanted: PrefetchPlan, cache_salt: str) -> bool:
        depth, batches = wanted.batches()
        if not batches:
            if len(self._done) >= _REMEMBERED:
                self._done.clear()
            self._done.add(request)
            return False
        leaf = self._index.root(cache_salt)
        for block in wanted.blocks(depth):
            leaf = self._index.child(leaf, block)
        missing = Counter(group for batch in batches for e in batch if (group := self._layout.group_of(e)) is not None)
        self._fetches[request] = fetch = _Fetch(request, leaf, missing)
        self._storage.read(batches, fetch)
        return True

    def take_over(self) -> None:
        """Store one arrived batch in the pools; no step may be in flight."""
        arrival = self._storage.take()
        if arrival is None:
            return
        if not arrival.entries:
            if isinstance(arrival.ticket, _Fetch):
                self._finish(arrival.ticket)
            return
        group = self._layout.group_of(arrival.entries[0])
        if group is None:
            self._put_snapshot(arrival.entries[0], arrival.data[0])
        else:
            # Batches arrive in the order of the requests.
            fetch = next(iter(self._fetches.values()), None)
            self._put_pages(group, arrival.entries, arrival.data, fetch.missing[group] if fetch else 0)
            if fetch:
                fetch.missing[group] -= len(arrival.entries)

    def _finish(self, fetch: _Fetch) -> None:
        # After a restart of the engine, requests of its predecessor also arrive.
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
        self._layout.put(number, pages, entries, data)
        for i, page in zip(missing, pages, strict=True):
            # The allocation may have evicted the node itself.
            node = self._index.node(entries[i].digest)
            if node is not None:
                self._index.put_page(node, number, page)
        group.release(pages[::-1])

    def _put_snapshot(self, entry: Entry, data: np.ndarray) -> None:
        node, tail = self._index.node(entry.parent), token_bytes(entry.tokens)
        if node is not None and self._index.covers(node, tail) is None:
            rows = self._layout.rows(entry, data)
            self._index.put_snapshot(node, tail, rows, rows.nbytes)
