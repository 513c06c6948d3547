"""The prefix cache on disk: an index of its files, and reading and writing in background threads. Knows bytes, not arrays.

After construction nothing here raises or blocks on the disk: on an error, the storage turns itself off, says so, and tries again later.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeVar

import numpy as np

from ...device import lower_thread_priority
from .disk_events import DiskEvents
from .page_dir import PageDir
from .pagefile import Entry, Name, shown

Job = Callable[[], None]


class Worker:
    """Runs jobs in order until it is closed. A daemon thread: the process may exit in the middle of a job, which does no harm."""

    def __init__(self, name: str, *, nice: int = 0) -> None:
        """`nice` lowers the thread's priority, on Linux only, where each thread has its own."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._nice = nice
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the jobs added so far; returns whether all are done."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_thread_priority(self._nice)
        while job := self._jobs.get():
            job()


_WRITING = 64 << 20
"""Bytes that may wait to be written: if the disk is slower than the model, pages are lost rather than memory."""
_ARRIVED = 48 << 20
"""Bytes read ahead that may wait to be stored."""
_LOWER = 10
"""Nice value of the writer thread."""
RETRY_S = 60.0
"""Seconds after an error before the disk is tried again: somebody may have made room, or mounted it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """Entries of one layout that were read. Without entries: the read with this ticket has ended."""

    entries: list[Entry]
    """What was read, in order."""
    data: np.ndarray
    """uint8 `[len(entries), layout.nbytes]`, row i for entry i."""
    ticket: object = None
    """The caller's object passed to `read`; only in the arrival that ends it."""


class DiskStorage:
    """Files of pages and snapshots under `directory`, at most `limit` bytes."""

    def __init__(self, directory: Path, limit: int, *, note: Callable[[str], None] | None = None) -> None:
        """`note` is called, from any thread, with one line for the user if the storage has to be turned off."""
        self.note = ""
        self._tell = note
        self._folder = PageDir(directory, limit)
        self._lock = threading.Condition()
        self._present: dict[bytes, set[Name]] = {}
        self._looked_up: set[bytes] = set()
        self._behind: dict[bytes, dict[str, set[Name]]] = {}
        self._writing = self._reading = self._looking = 0
        self._arrived: deque[Arrival] = deque()
        self._arrived_bytes = 0
        self._closed = self._abandoned = False
        self._retry_at = 0.0
        self._told = ""
        self._events: DiskEvents | None = None
        self._writer = Worker("mlxinfer-prefix-writer", nice=_LOWER)
        self._reader = Worker("mlxinfer-prefix-reader")
        self._writer.add(lambda: self._do(self._folder.prepare))

    @property
    def off(self) -> bool:
        """Whether it is turned off, for the reason in `note`, or closed."""
        if self.note and not self._closed and monotonic() >= self._retry_at:
            self._try_again()
        return bool(self.note) or self._closed

    def _try_again(self) -> None:
        """Begin anew, knowing no file."""
        with self._lock:
            if not self.note or self._looking:
                return
            self.note = ""
            self._present.clear()
            self._behind.clear()
            self._looked_up.clear()
        self._writer.add(lambda: self._do(self._folder.prepare))

    def send_events(self, events: DiskEvents) -> None:
        """Tell of every page that is written or removed from now on."""
        self._events = events

    def opened(self, root: bytes) -> bool:
        """Whether the files of a root are known. The first call starts listing them."""
        with self._lock:
            if root in self._present:
                return True
            if root not in self._looked_up and not self.off:
                self._looked_up.add(root)
                self._behind.setdefault(root, {})
                self._looking += 1
                self._reader.add(lambda: self._look_up(root))
            return self.off

    def has(self, root: bytes, name: Name) -> bool:
        """Whether a file seems to exist: it may be gone or invalid when it is read."""
        return not self.off and name in self._present.get(root, ())

    def behind(self, root: bytes, parent: bytes) -> list[Name]:
        """The files that seem to exist directly after a node."""
        if self.off:
            return []
        with self._lock:
            return list(self._behind.get(root, {}).get(shown(parent), ()))

    def takes(self, nbytes: int) -> bool:
        """Whether `write` can take this many bytes now."""
        return not self.off and (not self._writing or self._writing + nbytes <= _WRITING)

    def write(self, entry: Entry, data: np.ndarray, *, behind: Name | None = None) -> None:
        """Write `data`, uint8 `[layout.nbytes]`, in the background; it must not change any more. It counts as present from now on. `behind`
        names a file without which it is useless: if that is gone by then, nothing is written."""
        with self._lock:
            self._writing += data.nbytes
        self._add(entry)
        self._writer.add(lambda: self._write(entry, data, behind))

    def mark_used(self, root: bytes, name: Name) -> None:
        """Make a file, and all that it follows, the last to be evicted."""
        if self.has(root, name):
            self._writer.add(lambda: self._folder.mark_used(root, name))

    def read(self, batches: Sequence[Sequence[Entry]], ticket: object = None) -> None:
        """Read these in order, in the background. The entries of a batch have one layout and arrive together. Each entry depends on those
        before it: the first missing one ends the read. The last arrival has only the ticket."""
        with self._lock:
            self._reading += 1
        self._reader.add(lambda: self._read(batches, ticket))

    @property
    def reading(self) -> bool:
        """Whether anything is on its way, or has arrived and was not taken."""
        with self._lock:
            return not self.off and bool(self._reading or self._arrived)

    def take(self) -> Arrival | None:
        """The oldest arrival, or None."""
        with self._lock:
            if not self._arrived:
                return None
            found = self._arrived.popleft()
            self._arrived_bytes -= found.data.nbytes
            self._lock.notify_all()
            return found

    @property
    def arrived(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._arrived)

    def wait(self, timeout_s: float) -> None:
        """Wait until something arrives, a root is listed or nothing is on its way, at most `timeout_s` seconds."""
        with self._lock:
            looking = self._looking
            self._lock.wait_for(lambda: self._arrived or self._looking < looking or not (self._reading or looking) or self.off, timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Turn off; wait up to `timeout_s` seconds for pending writes. Returns whether all were written."""
        with self._lock:
            self._closed = True
            self._arrived.clear()
            self._lock.notify_all()
        self._reader.close(0)
        done = self._writer.close(timeout_s)
        self._abandoned = not done
        return done

    def _look_up(self, root: bytes) -> None:
        names = self._do(lambda: self._folder.names(root)) or []
        with self._lock:
            for name in names:
                self._behind[root].setdefault(name.parent, set()).add(name)
            # Includes what was written in the meantime.
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

    def _forget(self, root: bytes, name: Name) -> None:
        with self._lock:
            self._present.get(root, set()).discard(name)
            behind = self._behind.get(root, {})
            if name in (names := behind.get(name.parent, set())):
                names.remove(name)
                if not names:
                    del behind[name.parent]
                if self._events:
                    self._events.removed(name)

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
        """The result of `work`; on OSError, None, and the storage is off."""
        try:
            return work()
        except OSError as error:
            with self._lock:
                self.note = self.note or f"the prefix cache on disk is off: {self._folder.directory}: {error.strerror or error}"
                self._retry_at = monotonic() + RETRY_S
                first, self._told = self.note != self._told, self.note
                if self._events:
                    self._events.all_removed()
                self._lock.notify_all()
            if first and self._tell and not self._closed:
                self._tell(self.note)
            return None

    def _read(self, batches: Sequence[Sequence[Entry]], ticket: object) -> None:
        for entries in batches:
            data = np.empty((len(entries), entries[0].layout.nbytes), np.uint8)
            good = 0
            while good < len(entries) and not self.off and self._folder.read(entries[good], data[good]):
                good += 1
            if good:
                self._arrive(Arrival(list(entries[:good]), data[:good]))
            if good < len(entries):
                self._forget(entries[good].root, entries[good].file)
                break
        self._arrive(Arrival([], np.empty(0, np.uint8), ticket))
        with self._lock:
            self._reading -= 1
            self._lock.notify_all()

    def _arrive(self, arrival: Arrival) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self.off or self._arrived_bytes + arrival.data.nbytes <= _ARRIVED or not self._arrived)
            if not self.off:
                self._arrived.append(arrival)
                self._arrived_bytes += arrival.data.nbytes
                self._lock.notify_all()
