"""Sources of pages and snapshots outside of memory, as bytes.

After construction nothing here raises or blocks: after an error a source turns itself off, reports it, and tries again later.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from ...util.background import lower_thread_priority
from .disk_events import DiskEvents
from .pagefile import Entry, Name, shown

Job = Callable[[], None]


class BackgroundWorker:
    """Daemon thread that runs jobs in order until closed; the process may exit during a job without harm."""

    def __init__(self, name: str, *, nice: int = 0) -> None:
        """Create a worker; `nice` lowers its priority on Linux, where priorities are per thread."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._nice = nice
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the jobs added so far. Returns True if all are done."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_thread_priority(self._nice)
        while job := self._jobs.get():
            job()


_ARRIVED = 48 << 20
"""Maximum bytes read ahead and not yet stored."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Entries of one layout that were read; an arrival without entries ends the read of its ticket."""

    entries: list[Entry]
    data: np.ndarray
    """Data, uint8 `[len(entries), layout.nbytes]`, row i for entry i."""
    ticket: object = None
    """Object passed to `read`; only in the last arrival."""


class PageSource:
    """Base of `DiskStorage` and `remote.PeerStorage`, from which `PrefixPrefetcher` reads."""

    def __init__(self, reader: str, note: Callable[[str], None] | None = None) -> None:
        """Create a source with a reading thread named `reader`.

        `note` is called from any thread with one line for the user when the source turns itself off.
        """
        self.note = ""
        self._tell = note
        self._told = ""
        self._retry_at = 0.0
        self._lock = threading.Condition()
        self._present: dict[bytes, set[Name]] = {}
        self._behind: dict[bytes, dict[str, set[Name]]] = {}
        self._reading = self._looking = 0
        self._arrived: deque[Arrival] = deque()
        self._arrived_bytes = 0
        self._closed = False
        self._events: DiskEvents | None = None
        self._reader = BackgroundWorker(reader)

    @property
    def off(self) -> bool:
        """True if the source is turned off, for the reason in `note`, or closed."""
        return bool(self.note) or self._closed

    def opened(self, root: bytes, tokens: Sequence[int] = (), reused: Callable[[], int] = lambda: 0) -> bool:
        """Return True if the contents of a root for a prompt are known; the first call starts the search.

        `reused` returns the number of the prompt's tokens in memory.
        """
        raise NotImplementedError

    def has(self, root: bytes, name: Name) -> bool:
        """Return True if a file seems to exist; it may be gone or invalid when read."""
        return not self.off and name in self._present.get(root, ())

    def behind(self, root: bytes, parent: bytes) -> list[Name]:
        """Return the files that seem to exist directly after a node."""
        if self.off:
            return []
        with self._lock:
            return list(self._behind.get(root, {}).get(shown(parent), ()))

    def mark_used(self, root: bytes, name: Name) -> None:
        """Mark a file and all before it as most recently used."""

    def send_events(self, events: DiskEvents) -> None:
        """Report every page written or removed from now on."""
        self._events = events

    def read(self, batches: Sequence[Sequence[Entry]], ticket: object = None) -> None:
        """Read batches in order in the background.

        The entries of a batch have one layout and arrive together. Each entry depends on the ones before, so the first missing one ends the
        read. The last arrival has only the ticket.
        """
        with self._lock:
            self._reading += 1
        self._reader.add(lambda: self._read(batches, ticket))

    @property
    def reading(self) -> bool:
        """True if a read is pending or an arrival was not taken."""
        with self._lock:
            return not self.off and bool(self._reading or self._arrived)

    def take(self) -> Arrival | None:
        """Return the oldest arrival, or None."""
        with self._lock:
            if not self._arrived:
                return None
            found = self._arrived.popleft()
            self._arrived_bytes -= found.data.nbytes
            self._lock.notify_all()
            return found

    @property
    def arrived(self) -> bool:
        """True if `take` would return an arrival."""
        return bool(self._arrived)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds until data arrives, a root is listed or nothing is pending."""
        with self._lock:
            looking = self._looking
            self._lock.wait_for(lambda: self._arrived or self._looking < looking or not (self._reading or looking) or self.off, timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Turn off and wait up to `timeout_s` seconds for pending writes. Returns True if all were written."""
        with self._lock:
            self._closed = True
            self._arrived.clear()
            self._lock.notify_all()
        self._reader.close(0)
        return True

    def _turn_off(self, note: str, retry_s: float) -> None:
        """Turn off for `seconds`. The first reason stays, and a note is reported once."""
        with self._lock:
            self._retry_at = monotonic() + retry_s
            self.note = note = self.note or note  # last, because `off` may read it at any moment
            first, self._told = note != self._told, note
            self._lock.notify_all()
        if first and self._tell and not self._closed:
            self._tell(note)

    def _fill(self, entries: Sequence[Entry], data: np.ndarray) -> int:
        """Read entries into the rows of `data` and return the number read."""
        raise NotImplementedError

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

    def _read(self, batches: Sequence[Sequence[Entry]], ticket: object) -> None:
        for entries in batches:
            data = np.empty((len(entries), entries[0].layout.nbytes), np.uint8)
            good = self._fill(entries, data)
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
