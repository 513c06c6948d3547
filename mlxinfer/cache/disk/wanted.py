"""What has to be read from disk so that as much as possible of a prompt is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..matching import find
from ..pages import PAGE, AttentionGroup
from ..prefix import BLOCK, ITEM, PrefixIndex, token_bytes
from .entries import Entries, snapshot_name, tail_length
from .pagefile import Entry
from .tier import DiskTier

_BATCH = 8 << 20
"""Bytes that are taken over at once: some milliseconds."""

Goal = tuple[int, int, "bytes | None"]
"""A position, its full pages, and the tail of the snapshot on disk that it needs, or None."""


class Wanted:
    """The way to the goal of one prompt."""

    def __init__(self, index: PrefixIndex, tier: DiskTier, entries: Entries, tokens: Sequence[int], adapter: str) -> None:
        self._index = index
        self._tier = tier
        self._entries = entries
        self._data = token_bytes(tokens)
        self._limit = len(tokens) - 1
        self.root = index.root_digest(adapter)
        self._digests = [self.root, *index.digests(tokens, adapter)]
        self._reused = find(index, tokens, adapter).reused
        self._runs = self._all_runs()

    def batches(self) -> tuple[int, list[list[Entry]]]:
        """Full pages of the goal, and what to read, in this order. Nothing where there is nothing to gain."""
        for position, depth, tail in self._goals():
            if position <= self._reused:
                break
            if self._complete(position, depth) and self._fits(position, depth):
                return depth, self._missing(position, depth, tail)
        return 0, []

    def blocks(self, depth: int) -> Iterator[bytes]:
        """Tokens of the nodes down to a depth."""
        for start in range(0, depth * BLOCK, BLOCK):
            yield self._data[start : start + BLOCK]

    def _goals(self) -> Iterator[Goal]:
        """Where one could go on, the last position first, as far as that does not depend on pages."""
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
        """Of snapshots behind a node that agree with the prompt as a whole."""
        digest = self._digests[depth]
        for name in self._tier.behind(self.root, digest):
            count = tail_length(name)
            if count is not None:
                tail = self._data[depth * BLOCK : depth * BLOCK + count * ITEM]
                if count < PAGE and snapshot_name(digest, tail) == name:
                    yield tail

    def _all_runs(self) -> list[list[int]]:
        """By depth and group, how many pages in a row there are up to it, in memory or on disk."""
        runs = [[0] * len(self._index.groups)]
        for depth in range(1, len(self._digests)):
            there = [self._in_memory(depth, g) or self._on_disk(depth, g) for g in range(len(self._index.groups))]
            runs.append([run + 1 if is_there else 0 for run, is_there in zip(runs[-1], there, strict=True)])
        return runs

    def _in_memory(self, depth: int, group: int) -> bool:
        node = self._index.node(self._digests[depth])
        return node is not None and node.pages[group] is not None

    def _on_disk(self, depth: int, group: int) -> bool:
        name = self._entries.page_name(self._digests[depth], self._digests[depth - 1], group)
        return self._tier.has(self.root, name)

    def _complete(self, position: int, depth: int) -> bool:
        return all(run >= depth - g.oldest(position) for g, run in zip(self._index.groups, self._runs[depth], strict=True))

    def _fits(self, position: int, depth: int) -> bool:
        """Whether all of it can be in memory at once, beside what running sequences have."""
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
                entry = self._entries.page(self.root, digests, block, d, number)
                if not batches or not _joins(batches[-1], entry):
                    batches.append([])
                batches[-1].append(entry)
        if tail is not None:
            batches.append([self._entries.snapshot(self.root, self._digests[depth], tail)])
        return batches


def _joins(batch: list[Entry], entry: Entry) -> bool:
    """Whether an entry belongs into a batch: it follows the last one, in the same form."""
    last = batch[-1]
    fits = (len(batch) + 1) * entry.layout.nbytes <= _BATCH
    return fits and last.layout is entry.layout and last.digest == entry.parent
