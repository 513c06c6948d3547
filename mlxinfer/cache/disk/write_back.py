"""Write-back of the prefix cache to disk: copies a little at a time and writes in the background."""

from __future__ import annotations

from collections import deque
from time import monotonic, sleep

from ..prefix_tree import Node, PrefixIndex, Snapshot
from .layout import CacheLayout
from .storage import DiskStorage

_AT_ONCE = 4 << 20
"""Bytes copied per call, or one larger page."""
_QUIET = 30
"""Pause after a copy while sequences run, as a multiple of the copy's duration."""
_MOST = 1 << 16
"""Maximum queued pages, and snapshots."""
_TURN_S = 0.005
"""Seconds between two attempts while the writer is busy."""


class WriteBack:
    """Implements `PrefixListener`: queues new pages and snapshots for the disk. Belongs to the cache's thread."""

    def __init__(self, index: PrefixIndex, storage: DiskStorage, layout: CacheLayout) -> None:
        self._index = index
        self._storage = storage
        self._layout = layout
        self._pages: deque[tuple[Node, int]] = deque()
        self._snapshots: deque[Snapshot] = deque()
        self._written: set[tuple[bytes, int]] = set()
        self._rest_until = 0.0
        index.listeners.append(self)

    def run(self, *, idle: bool) -> bool:
        """Copy a bounded amount; True while more is left. Unless `idle`, most calls return at once."""
        if self._storage.off:
            self._pages.clear()
            self._snapshots.clear()
        if not self._pages and not self._snapshots:
            return False
        started = monotonic()
        if idle or started >= self._rest_until:
            self._copy()
            self._rest_until = started + _QUIET * (monotonic() - started)
        return bool(self._pages or self._snapshots)

    def finish(self, deadline: float) -> None:
        """Copy everything until the deadline; later additions to the index are ignored."""
        while self.run(idle=True) and monotonic() < deadline:
            if not self._storage.takes(_AT_ONCE):
                sleep(_TURN_S)
        self._index.listeners.remove(self)

    def _copy(self) -> None:
        budget = _AT_ONCE
        while budget > 0 and self._pages:
            node, group = self._pages[0]
            nbytes = self._layout.page_bytes(node.depth, group)
            if not self._storage.takes(nbytes) or not self._storage.opened(node.chain()[0].digest):
                return
            del self._pages[0]
            budget -= nbytes if self._write_page(node, group) else 0
        while budget > 0 and self._snapshots and self._storage.takes(self._snapshots[0].nbytes):
            budget -= self._write_snapshot(self._snapshots.popleft())

    def _write_page(self, node: Node, group: int) -> bool:
        """Copy a page and return True; earlier pages, on which it depends, are queued first."""
        root = node.chain()[0].digest
        missing = self._not_there(root, node, group)
        if not missing or any(n.pages[group] is None or self._index.node(n.digest) is not n for n in missing):
            return False
        if any((n.digest, group) in self._written for n in missing):
            # An earlier page was evicted from disk, which is therefore full.
            return False
        if len(missing) > 1:
            self._pages.extendleft((n, group) for n in missing)
            return False
        self._written.add((node.digest, group))
        parent, behind = node.parent, None
        if parent and parent.parent and self._index.groups[group].window is None:
            behind = self._layout.page_name(parent.digest, parent.parent.digest, group)
        self._storage.write(self._layout.page_of(root, node, group), self._layout.copied_page(node, group), behind=behind)
        return True

    def _not_there(self, root: bytes, node: Node, group: int) -> list[Node]:
        """Return the node and its parents without a file, last one first; with a window, only the node."""
        missing: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            if self._storage.has(root, self._layout.page_name(at.digest, at.parent.digest, group)):
                break
            missing.append(at)
            at = at.parent if self._index.groups[group].window is None else None
        return missing

    def _write_snapshot(self, snapshot: Snapshot) -> int:
        """Copy a snapshot and return its bytes."""
        root = snapshot.node.chain()[0].digest
        if snapshot not in self._index.snapshots:
            return 0
        entry = self._layout.snapshot_of(root, snapshot)
        if self._storage.has(root, entry.file):
            return 0
        self._storage.write(entry, self._layout.copied_snapshot(snapshot))
        return snapshot.nbytes

    def page_stored(self, node: Node, group: int) -> None:
        """Queue a page."""
        self._written.discard((node.digest, group))
        if len(self._pages) < _MOST and not self._storage.off:
            self._pages.append((node, group))

    def page_removed(self, node: Node, group: int) -> None:
        """Ignore evictions: a queued page that is gone is skipped."""

    def snapshot_stored(self, snapshot: Snapshot) -> None:
        """Queue a snapshot."""
        if len(self._snapshots) < _MOST and not self._storage.off:
            self._snapshots.append(snapshot)
