"""The disk tier as the cache uses it: what is there, reading and writing in the background. Knows bytes, and nothing of arrays.

Nothing here raises once it is made, and nothing waits for the disk: where it fails, the tier is off and says so once.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...device import lower_thread_priority
from .page_dir import PageDir
from .pagefile import Entry, Name, shown

Job = Callable[[], None]


class Worker:
    """Does jobs in order until it is closed. It never keeps the process from ending: a job that is cut then leaves no harm."""

    def __init__(self, name: str, *, nice: int = 0) -> None:
        """`nice` lowers its priority, on Linux, where a thread has one of its own."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._nice = nice
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait so long for what was added; whether all of it is done."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_thread_priority(self._nice)
        while job := self._jobs.get():
            job()


_WRITING = 64 << 20
"""Bytes that may wait to be written: a disk that is slower than the model loses pages, not memory."""
_ARRIVED = 48 << 20
"""Bytes that may wait to be taken over, read ahead."""
_LOWER = 10
"""By so much the priority of writing."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """Entries of one layout that were read: row i of `data`, uint8 `[len(entries), layout.nbytes]`, is the data of the i-th. Without any:
    what was to be read with this ticket is at its end."""

    entries: list[Entry]
    data: np.ndarray
    ticket: object = None


class DiskStorage:
    """Files of pages and snapshots under `directory`, at most `limit` bytes."""

    def __init__(self, directory: Path, limit: int, *, note: Callable[[str], None] | None = None) -> None:
        """`note` is called, from any thread, with one line for people if the tier has to be switched off."""
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
        self._writer = Worker("mlxinfer-prefix-writer", nice=_LOWER)
        self._reader = Worker("mlxinfer-prefix-reader")
        self._writer.add(lambda: self._do(self._folder.prepare))

    @property
    def off(self) -> bool:
        """Whether it has given up, for the reason in `note`, or is closed."""
        return bool(self.note) or self._closed

    def opened(self, root: bytes) -> bool:
        """Whether it is known what there is of a root. The first call has it looked up."""
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
        """Whether there seems to be a file: it may be gone or wrong when it is read."""
        return not self.off and name in self._present.get(root, ())

    def behind(self, root: bytes, parent: bytes) -> list[Name]:
        """What there seems to be right behind a node."""
        if self.off:
            return []
        with self._lock:
            return list(self._behind.get(root, {}).get(shown(parent), ()))

    def takes(self, nbytes: int) -> bool:
        """Whether so much can be given to `write` now."""
        return not self.off and (not self._writing or self._writing + nbytes <= _WRITING)

    def write(self, entry: Entry, data: np.ndarray, *, behind: Name | None = None) -> None:
        """Keep `data`, uint8 `[layout.nbytes]`, which nobody changes any more. It counts as present from now on. `behind` names a file
        without which it is of no use: should that be gone by then, it is not written."""
        with self._lock:
            self._writing += data.nbytes
        self._add(entry)
        self._writer.add(lambda: self._write(entry, data, behind))

    def mark_used(self, root: bytes, name: Name) -> None:
        """What is used last is kept longest, and with it all that it lies behind."""
        if self.has(root, name):
            self._writer.add(lambda: self._folder.mark_used(root, name))

    def read(self, batches: Sequence[Sequence[Entry]], ticket: object = None) -> None:
        """Have these read in order, the entries of a batch, of one layout, together. Each depends on those before it: the first that is
        not there ends it. What arrives last is nothing but the ticket."""
        with self._lock:
            self._reading += 1
        self._reader.add(lambda: self._read(batches, ticket))

    @property
    def reading(self) -> bool:
        """Whether anything is on its way, or has arrived and was not taken."""
        with self._lock:
            return not self.off and bool(self._reading or self._arrived)

    def take(self) -> Arrival | None:
        """What has arrived first."""
        with self._lock:
            if not self._arrived:
                return None
            found = self._arrived.popleft()
            self._arrived_bytes -= found.data.nbytes
            self._lock.notify_all()
            return found

    @property
    def arrived(self) -> bool:
        return bool(self._arrived)

    def wait(self, timeout_s: float) -> None:
        """Until something has arrived or was looked up, or nothing is on its way any more."""
        with self._lock:
            looking = self._looking
            self._lock.wait_for(lambda: self._arrived or self._looking < looking or not (self._reading or looking) or self.off, timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Wait so long for what is to be written; whether all of it was. The tier is off from then on."""
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
            # What was written in the meantime is there as well.
            self._present[root] = {name for others in self._behind[root].values() for name in others}
            self._looking -= 1
            self._lock.notify_all()

    def _add(self, entry: Entry) -> None:
        with self._lock:
            self._behind.setdefault(entry.root, {}).setdefault(entry.file.parent, set()).add(entry.file)
            if entry.root in self._present:
                self._present[entry.root].add(entry.file)

    def _forget(self, root: bytes, name: Name) -> None:
        with self._lock:
            self._present.get(root, set()).discard(name)
            behind = self._behind.get(root, {})
            if name in (names := behind.get(name.parent, set())):
                names.remove(name)
                if not names:
                    del behind[name.parent]

    def _write(self, entry: Entry, data: np.ndarray, behind: Name | None) -> None:
        useless = behind is not None and behind not in self._present.get(entry.root, ())
        if useless or self._abandoned or self.note or not self._do(lambda: self._folder.write(entry, data)):
            self._forget(entry.root, entry.file)
        for root, name in self._folder.removed():
            self._forget(root, name)
        with self._lock:
            self._writing -= data.nbytes

    def _do(self, work: Callable[[], _T]) -> _T | None:
        """None, and the end of the tier, where it fails."""
        try:
            return work()
        except OSError as error:
            with self._lock:
                first = not self.note
                self.note = self.note or f"the prefix cache on disk is off: {self._folder.directory}: {error.strerror or error}"
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
