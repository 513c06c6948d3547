"""Reads records of a file of experts into memory, several at once, past the system's cache where that is possible."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

from ..errors import ExpertReadError
from ..util.uncached_file import PAGE, bypass_cache, drop_pages, set_direct
from .file_format import ExpertFile

THREADS = 4
"""Reads at once: `python -m benchmarks expert-reads` compares numbers of threads."""
DIRECT_ALIGNMENT = 512
"""Addresses and lengths of memory that a disk writes to must be multiples of this, on most disks."""

_WAITING, _RUNNING, _DONE, _CANCELLED = range(4)
_INTERRUPTED = os.strerror(errno.EINTR)

ReadInto = Callable[[int, Sequence[Any], int], int]
"""Reads from a descriptor into buffers, at an offset, as `os.preadv`."""


class ReadWay(IntEnum):
    """Ways to read a record, the cheapest first."""

    STRAIGHT = 0
    """From the disk into the slots, without a copy."""
    BOUNCED = 1
    """From the disk into an aligned buffer, and from there into the slots."""
    BUFFERED = 2
    """Through the system's cache on Linux, whose pages are dropped at once. On macOS `F_NOCACHE` avoids the cache."""


class ExpertRead:
    """One record on its way to a slot."""

    __slots__ = ("error", "lock", "nbytes", "offset", "state", "stride", "targets")

    def __init__(self, offset: int, nbytes: int, stride: int, targets: Sequence[Any]) -> None:
        self.offset, self.nbytes, self.stride = offset, nbytes, stride
        self.targets = targets
        """Writable buffers of uint8 for the parts of the record, in order, `nbytes` together."""
        self.state = _WAITING
        self.error: OSError | None = None
        self.lock = threading.Lock()
        self.lock.acquire()  # released when the read is done or cancelled

    @property
    def is_over(self) -> bool:
        return self.state >= _DONE

    @property
    def is_whole(self) -> bool:
        """True if the record is in memory."""
        return self.state == _DONE and self.error is None


class ExpertReader:
    """A pool of threads that read records of one file.

    Demanded reads start before predicted ones. The caller of `wait` reads too, so that a single read needs no other thread. An exception of
    a signal handler at any point in the caller's thread leaves the reader usable: hence no `threading.Condition`, whose methods may be
    interrupted while they hold a lock.
    """

    def __init__(self, file: ExpertFile, threads: int = THREADS, read: ReadInto | None = None) -> None:
        """Read through `read`, which is `os.preadv` unless a test replaces it."""
        self._file = file
        self._read_into: ReadInto = read or os.preadv
        self._lock = threading.Lock()
        self._demanded: deque[ExpertRead] = deque()
        self._predicted: deque[ExpertRead] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        """An entry lets one thread do all reads that wait."""
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._bounce = threading.local()
        self._padding = mmap.mmap(-1, PAGE)
        """Receives the padding of records, from all threads."""
        self._way = ReadWay.STRAIGHT if bypass_cache(file.descriptor) else ReadWay.BUFFERED
        for number in range(threads):
            thread = threading.Thread(target=self._run, name=f"mlxinfer-experts-{number}", daemon=True)
            with suppress(RuntimeError):  # no more threads: the caller of `wait` reads
                thread.start()
                self._threads.append(thread)

    @property
    def way(self) -> ReadWay:
        """The way to read records whose slots are aligned. Others need a buffer. A disk that refuses a way gets the next one."""
        return self._way

    @way.setter
    def way(self, way: ReadWay) -> None:
        self._way = way
        set_direct(self._file.descriptor, way != ReadWay.BUFFERED)

    def submit(self, reads: Sequence[ExpertRead], *, demanded: bool, helped: bool = False) -> None:
        """Start reads. `helped`: the caller calls `wait` at once, and does one of the reads itself."""
        if self._closing:
            raise ExpertReadError("the model was closed while it computed")
        (self._demanded if demanded else self._predicted).extend(reads)
        for _ in range(min(len(reads) - helped, len(self._threads))):
            self._wake.put(None)

    def promote(self, read: ExpertRead) -> None:
        """Treat a predicted read as a demanded one."""
        self._demanded.append(read)

    def cancel(self, read: ExpertRead) -> bool:
        """Cancel a read unless it has started. True if its slot is free."""
        with self._lock:
            if read.state == _WAITING:
                read.state = _CANCELLED
                read.targets = ()
                read.lock.release()
            return read.state == _CANCELLED

    def wait(self, reads: Sequence[ExpertRead]) -> None:
        """Wait until all reads are over, and do those that have not started. A read that failed has an `error`."""
        for read in reads:
            if read.state == _WAITING:
                mine = False
                try:
                    with self._lock:
                        mine = read.state == _WAITING
                        if mine:
                            read.state = _RUNNING
                    if mine:
                        self._do(read)
                except BaseException:
                    # Without this, a read that was interrupted between the two lines would never be over.
                    if mine and not read.is_over:
                        self._end(read, InterruptedError(errno.EINTR, _INTERRUPTED))
                    raise
        for read in reads:
            if not read.is_over:
                with read.lock:
                    pass

    def failed(self, read: ExpertRead) -> ExpertReadError:
        """The error of a read that is not whole."""
        why = read.error.strerror or str(read.error) if read.error else "the model was closed"
        return ExpertReadError(f"cannot read experts from {self._file.path} ({why}): check the disk, and load the model again")

    def _run(self) -> None:
        while not self._closing:
            self._wake.get()
            while (read := self._next()) is not None:
                self._do(read)

    def _next(self) -> ExpertRead | None:
        """Return the next read, marked as running."""
        with self._lock:
            for queue in (self._demanded, self._predicted):
                while queue:
                    read = queue.popleft()
                    if read.state == _WAITING:
                        read.state = _RUNNING
                        return read
        return None

    def _do(self, read: ExpertRead) -> None:
        error: OSError | None = InterruptedError(errno.EINTR, _INTERRUPTED)
        try:
            self._fill(read)
            error = None
        except OSError as found:
            error = found
        finally:
            self._end(read, error)

    def _end(self, read: ExpertRead, error: OSError | None) -> None:
        read.error, read.targets, read.state = error, (), _DONE
        read.lock.release()

    def _fill(self, read: ExpertRead) -> None:
        """Read a record, in the way that this file system supports. Raises OSError."""
        while True:
            way = self._way
            try:
                if way == ReadWay.BUFFERED:
                    self._whole(read.targets, read.offset, read.nbytes)
                    drop_pages(self._file.descriptor, read.offset, read.stride)
                elif way == ReadWay.BOUNCED or not _is_aligned(read.targets):
                    self._through_bounce(read)
                else:
                    padding = read.stride - read.nbytes
                    targets = [*read.targets, memoryview(self._padding)[:padding]] if padding else read.targets
                    self._whole(targets, read.offset, read.stride)
                return
            except OSError as error:
                if error.errno != errno.EINVAL or way == ReadWay.BUFFERED:
                    raise
            with self._lock:  # this disk wants another alignment, or cannot bypass the cache
                if self._way == way:
                    self.way = ReadWay(way + 1)

    def _through_bounce(self, read: ExpertRead) -> None:
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < read.stride:
            buffer = self._bounce.buffer = mmap.mmap(-1, read.stride)
        self._whole([memoryview(buffer)[: read.stride]], read.offset, read.stride)
        at = 0
        for target in read.targets:
            target[:] = memoryview(buffer)[at : at + len(target)]
            at += len(target)

    def _whole(self, targets: Sequence[Any], offset: int, wanted: int) -> None:
        """Fill all targets. Raises OSError, also where the file ends."""
        got = self._read_into(self._file.descriptor, targets, offset)
        while got < wanted:
            if os.fstat(self._file.descriptor).st_size < offset + wanted:
                raise OSError(errno.EIO, "the file was truncated")
            rest = _after(targets, got)
            more = self._read_into(self._file.descriptor, rest, offset + got) if rest else 0
            if not more:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            got += more

    def close(self) -> None:
        """Cancel waiting reads and end the threads. Running reads end first."""
        self._closing = True
        with self._lock:
            waiting = [*self._demanded, *self._predicted]
            self._demanded.clear()
            self._predicted.clear()
        for read in waiting:
            self.cancel(read)
        for _ in self._threads:
            self._wake.put(None)
        for thread in self._threads:
            thread.join()


def _after(targets: Sequence[Any], count: int) -> list[Any]:
    """The parts of buffers after their first `count` bytes."""
    rest = []
    for target in targets:
        if count < len(target):
            rest.append(target[count:])
        count = max(count - len(target), 0)
    return rest


def _is_aligned(targets: Sequence[Any]) -> bool:
    return all(len(each) % DIRECT_ALIGNMENT == 0 and each.ctypes.data % DIRECT_ALIGNMENT == 0 for each in targets)
