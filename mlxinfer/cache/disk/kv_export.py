"""Exports pages and snapshots of the prefix cache, each in its file format on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..prefix_tree import BLOCK, Node, PrefixIndex, token_bytes
from .layout import CacheLayout
from .pagefile import Entry, checksum

Wanted = tuple[bytes, bytes, str]
"""(digest of a page's or snapshot's node, digest of the node before, part), as in `Entry`."""


class KVExport:
    """Exporter, used by the cache's thread while no page is written."""

    def __init__(self, index: PrefixIndex, entries: CacheLayout) -> None:
        self._index = index
        self._entries = entries

    @property
    def root(self) -> bytes:
        """Digest of everything besides tokens on which pages depend."""
        return self._index.root_digest()

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Return the file names of a prompt's cached pages and snapshots."""
        data, found = token_bytes(tokens), []
        for node in self._chain(tokens):
            if node.parent is not None:
                pages = [group for group, page in enumerate(node.pages) if page is not None]
                found += [self._entries.page_name(node.digest, node.parent.digest, group) for group in pages]
            behind = data[node.depth * BLOCK :]
            found += [self._entries.snapshot_of(self.root, s).file for s in node.snapshots if behind.startswith(s.tail)]
        return list(map(str, found))

    def file(self, wanted: Wanted) -> bytes | None:
        """Return a page or snapshot as a file; None if it is not cached."""
        digest, parent, part = wanted
        if part in self._entries.parts:
            node, group = self._index.node(digest), self._entries.parts.index(part)
            if node is None or node.parent is None or node.parent.digest != parent or node.pages[group] is None:
                return None
            return _file(self._entries.page_of(self.root, node, group), self._entries.copied_page(node, group))
        before = self._index.node(parent)
        for snapshot in before.snapshots if before else ():
            entry = self._entries.snapshot_of(self.root, snapshot)
            if (entry.digest, entry.part) == (digest, part):
                return _file(entry, self._entries.copied_snapshot(snapshot))
        return None

    def _chain(self, tokens: Sequence[int]) -> Iterator[Node]:
        for digest in (self.root, *self._index.digests(tokens)):
            node = self._index.node(digest)
            if node is None:
                return
            yield node


def _file(entry: Entry, data: np.ndarray) -> bytes:
    return entry.head(checksum(data)) + data.tobytes()
