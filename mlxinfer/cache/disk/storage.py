"""Prefix cache on disk: an index of files, and background threads that read and write bytes.

After construction nothing here raises or blocks on the disk: after an error the storage turns itself off, reports it, and tries again
later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar

import numpy as np

from .backend import BackgroundWorker, PageSource
from .page_dir import PageDir
from .pagefile import Entry, Name

_WRITING = 64 << 20
"""Maximum bytes waiting to be written; if the disk is slower than the model, pages are dropped."""
_LOWER = 10
"""Nice value of the writer thread."""
RETRY_S = 60.0
"""Seconds between an error and the next attempt."""

_T = TypeVar("_T")


class DiskStorage(PageSource):
    """Files of pages and snapshots under `directory`, at most `limit` bytes."""

    def __init__(self, directory: Path, limit: int, *, note: Callable[[str], None] | None = None) -> None:
        """Open a directory; `note` is called from any thread with one line if the storage is turned off."""
        super().__init__("mlxinfer-prefix-reader", note)
        self._folder = PageDir(directory, limit)
        self._looked_up: set[bytes] = set()
        self._writing = 0
        self._abandoned = False
        self._writer = BackgroundWorker("mlxinfer-prefix-writer", nice=_LOWER)
        self._writer.add(lambda: self._do(self._folder.prepare))

    @property
    def off(self) -> bool:
        """True if the storage is turned off, for the reason in `note`, or closed."""
        if self.note and not self._closed and monotonic() >= self._retry_at:
            self._try_again()
        return bool(self.note) or self._closed

    def _try_again(self) -> None:
        """Reset the index."""
        with self._lock:
            if not self.note or self._looking:
                return
            self.note = ""
            self._present.clear()
            self._behind.clear()
            self._looked_up.clear()
        self._writer.add(lambda: self._do(self._folder.prepare))

    def opened(self, root: bytes, tokens: Sequence[int] = (), reused: Callable[[], int] = lambda: 0) -> bool:
        """Return True if the files of a root are listed; the first call starts the listing."""
        with self._lock:
            if root in self._present:
                return True
            if root not in self._looked_up and not self.off:
                self._looked_up.add(root)
                self._behind.setdefault(root, {})
                self._looking += 1
                self._reader.add(lambda: self._look_up(root))
            return self.off

    def takes(self, nbytes: int) -> bool:
        """Return True if `write` accepts `nbytes` now."""
        return not self.off and (not self._writing or self._writing + nbytes <= _WRITING)

    def write(self, entry: Entry, data: np.ndarray, *, behind: Name | None = None) -> None:
        """Write `data`, uint8 `[layout.nbytes]`, in the background; the array must not change later.

        The entry counts as present at once. If the file `behind`, on which it depends, is gone by then, nothing is written.
        """
        with self._lock:
            self._writing += data.nbytes
        self._add(entry)
        self._writer.add(lambda: self._write(entry, data, behind))

    def mark_used(self, root: bytes, name: Name) -> None:
        if self.has(root, name):
            self._writer.add(lambda: self._folder.mark_used(root, name))

    def close(self, timeout_s: float = 2.0) -> bool:
        super().close()
        done = self._writer.close(timeout_s)
        self._abandoned = not done
        return done

    def _fill(self, entries: Sequence[Entry], data: np.ndarray) -> int:
        good = 0
        while good < len(entries) and not self.off and self._folder.read(entries[good], data[good]):
            good += 1
        return good

    def _look_up(self, root: bytes) -> None:
        names = self._do(lambda: self._folder.names(root)) or []
        with self._lock:
            for name in names:
                self._behind[root].setdefault(name.parent, set()).add(name)
            # Includes files written meanwhile.
            self._present[root] = {name for others in self._behind[root].values() for name in others}
            self._looking -= 1
            self._lock.notify_all()

    def _add(self, entry: Entry) -> None:
        with self._lock:
            self._behind.setdefault(entry.root, {}).setdefault(entry.file.parent, set()).add(entry.file)
            if entry.root in self._present:
                self._present[entry.root].add(entry.file)
            if self._events:
                self._events.added(entry)

    def _write(self, entry: Entry, data: np.ndarray, behind: Name | None) -> None:
        useless = behind is not None and behind not in self._present.get(entry.root, ())
        if useless or self._abandoned or self.note or not self._do(lambda: self._folder.write(entry, data)):
            self._forget(entry.root, entry.file)
        else:
            self._told = ""
        for root, name in self._folder.removed():
            self._forget(root, name)
        with self._lock:
            self._writing -= data.nbytes

    def _do(self, work: Callable[[], _T]) -> _T | None:
        """Return the result of `work`; on OSError turn off and return None."""
        try:
            return work()
        except OSError as error:
            self._turn_off(f"the prefix cache on disk is off: {self._folder.directory}: {error.strerror or error}", RETRY_S)
            with self._lock:
                if self._events:
                    self._events.all_removed()
            return None
