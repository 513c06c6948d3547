"""KV events of pages on disk."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv_events import DISK, BlockRemoved, BlockStored, KVEventSink, block_hash, published_ids
from .pagefile import Entry, Name


class DiskEvents:
    """Reports pages with the medium `DISK` to `sink`.

    Only pages of this process count, because file names of earlier processes do not have tokens. The storage calls it from any thread, one
    at a time.
    """

    def __init__(self, sink: KVEventSink, parts: Sequence[str], unsalted: bytes) -> None:
        """Create a reporter; `parts` are the groups' names in files, in order, `unsalted` the digest of the root without a salt."""
        self._sink = sink
        self._groups = {part: group for group, part in enumerate(parts)}
        self._unsalted = unsalted
        self._told: dict[Name, BlockRemoved] = {}

    def added(self, entry: Entry) -> None:
        """Report a written page; snapshots are ignored."""
        group = self._groups.get(entry.part)
        if group is None or entry.file in self._told:
            return
        own, salt = block_hash(entry.digest), "" if entry.root == self._unsalted else entry.root.hex()
        parent = None if entry.parent == entry.root else block_hash(entry.parent)
        self._told[entry.file] = BlockRemoved(own, DISK, group)
        self._sink(BlockStored(own, parent, published_ids(entry.tokens), DISK, group, salt))

    def removed(self, name: Name) -> None:
        """Report a page whose file is gone or was never written."""
        event = self._told.pop(name, None)
        if event is not None:
            self._sink(event)

    def all_removed(self) -> None:
        """Report all pages as removed, because the disk is turned off."""
        for name in list(self._told):
            self.removed(name)
