"""Where pages and snapshots come from that memory lacks. Knows bytes, not arrays.

After construction nothing here raises or blocks: on an error, a source turns itself off, says so, and tries again later.
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


_ARRIVED = 48 << 20
"""Bytes read ahead that may wait to be stored."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Entries of one layout that were read. Without entries: the read with this ticket has ended."""

    entries: list[Entry]
    """What was read, in order."""
    data: np.ndarray
    """uint8 `[len(entries), layout.nbytes]`, row i for entry i."""
    ticket: object = None
    """The caller's object passed to `read`; only in the arrival that ends it."""


class PageSource:
    """What `PrefixPrefetcher` reads from: `DiskStorage`, or `peer.PeerStorage`."""

    def __init__(self, reader: str, note: Callable[[str], None] | None = None) -> None:
        """`reader` is the name of the thread that reads. `note` is called, from any thread, with one line for the user where the source
        turns itself off."""
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
        self._reader = Worker(reader)

    @property
    def off(self) -> bool:
        """Whether it is turned off, for the reason in `note`, or closed."""
        return bool(self.note) or self._closed

    def opened(self, root: bytes, tokens: Sequence[int] = (), reused: Callable[[], int] = lambda: 0) -> bool:
        """Whether it is known what there is of a root for a prompt. The first call starts looking. `reused` tells how many of its tokens
        are in memory."""
        raise NotImplementedError

    def has(self, root: bytes, name: Name) -> bool:
        """Whether something seems to exist: it may be gone or invalid when it is read."""
        return not self.off and name in self._present.get(root, ())

    def behind(self, root: bytes, parent: bytes) -> list[Name]:
        """What seems to exist directly after a node."""
        if self.off:
            return []
        with self._lock:
            return list(self._behind.get(root, {}).get(shown(parent), ()))

    def mark_used(self, root: bytes, name: Name) -> None:
        """Make something, and all that it follows, the last to be evicted."""

    def send_events(self, events: DiskEvents) -> None:
        """Tell of every page that is written or removed from now on."""
        self._events = events

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
        return True

    def _turn_off(self, note: str, retry_s: float) -> None:
        """For so many seconds. Where it is off already, the first reason stays. A note that was told is not told again."""
        with self._lock:
            self._retry_at = monotonic() + retry_s
            self.note = note = self.note or note  # last: `off` may look at any moment
            first, self._told = note != self._told, note
            self._lock.notify_all()
        if first and self._tell and not self._closed:
            self._tell(note)

    def _fill(self, entries: Sequence[Entry], data: np.ndarray) -> int:
        """Read entries, one after another, into the rows of `data`. Returns how many there were."""
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
