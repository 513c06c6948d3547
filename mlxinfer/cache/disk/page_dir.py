"""Directory of the prefix cache on disk: one folder per root, one file per part of a node, with a limit on the total.

Processes may share a directory.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .pagefile import Entry, Name, checksum, parsed, read_into

UNFINISHED = ".part"
_SPARE = 512 << 20
"""Bytes to leave free on the file system."""


@dataclass(slots=True)
class _File:
    path: Path
    name: Name
    used: float
    size: int


class PageDir:
    """Reads and writes files; one thread may read while another writes. Methods raise OSError unless stated otherwise."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._taken: int | None = None
        self._unseen = 0
        self._removed: list[tuple[bytes, Name]] = []

    def prepare(self) -> None:
        """Create the directory for this user only, because pages reveal conversations, and remove unfinished files of dead writers.

        Another user's directory is refused, because its owner could read and plant files. A link is refused, because its target's mode must
        not be changed.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if self.directory.is_symlink():
                raise OSError(error.errno, "it is a link: name the folder that it leads to") from None
            raise
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it belongs to another user")
            os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
        for path in self.directory.glob(f"*/*{UNFINISHED}"):
            with suppress(OSError):
                _remove_if_abandoned(path)

    def names(self, root: bytes) -> list[Name]:
        """Return all files of a root."""
        try:
            found = os.listdir(self._of(root))
        except FileNotFoundError:
            return []
        return [name for name in map(parsed, found) if name]

    def read(self, entry: Entry, data: np.ndarray) -> bool:
        """Fill `data`, uint8 `[entry.layout.nbytes]`; False without a valid file. An invalid file is removed. Raises nothing."""
        path = self._of(entry.root) / str(entry.file)
        try:
            good = read_into(path, entry, data)
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link
                return False
            good = False
        if not good:
            _remove(path)
        return good

    def mark_used(self, root: bytes, name: Name) -> None:
        """Mark a file as most recently used. Raises nothing."""
        with suppress(OSError):
            os.utime(self._of(root) / str(name), follow_symlinks=False)

    def write(self, entry: Entry, data: np.ndarray) -> bool:
        """Write a file atomically; False if it does not fit.

        Files are not synced. After a power failure a file may be invalid, which its checksum detects.
        """
        head = entry.head(checksum(data))
        size = len(head) + data.nbytes
        if not self._make_room(entry, size):
            return False
        folder = self._of(entry.root)
        try:
            self._write(folder, str(entry.file), head, data)
        except FileNotFoundError:
            # Another process removed the empty folder.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(folder, str(entry.file), head, data)
        self._taken = (self._taken or 0) + size
        self._unseen += size
        return True

    def removed(self) -> list[tuple[bytes, Name]]:
        """Return (root, name) of files evicted since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def _write(self, folder: Path, name: str, head: bytes, data: np.ndarray) -> None:
        unfinished = folder / f"{os.urandom(8).hex()}{UNFINISHED}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                # The lock shows that this writer is alive. On a file system without locks, `prepare` removes nothing either.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_all(descriptor, memoryview(head))
                _write_all(descriptor, data.data)
            finally:
                os.close(descriptor)
            os.replace(unfinished, folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def _of(self, root: bytes) -> Path:
        return self.directory / root.hex()

    def _make_room(self, entry: Entry, size: int) -> bool:
        """Keep the total below the limit; other processes' files are counted periodically."""
        if size > self.limit // 8:
            return False
        if self._taken is None or self._taken + size > self.limit or self._unseen > self.limit // 16:
            self._evict(entry, size)
        free = os.statvfs(self.directory)
        if free.f_bavail * free.f_frsize < size + _SPARE:
            raise OSError(errno.ENOSPC, f"less than {_SPARE / 2**30:g} GiB would be left on its file system")
        return (self._taken or 0) + size <= self.limit

    def _evict(self, entry: Entry, size: int) -> None:
        """Evict files until an entry fits and an eighth of the limit is free.

        Least recently used files go first, the end of a chain before its start, never the entry's ancestors.
        """
        files = list(self._files())
        self._taken, self._unseen = sum(f.size for f in files), 0
        enough = self.limit - max(self.limit // 8, size)
        if self._taken <= enough:
            return
        new = _File(self._of(entry.root) / str(entry.file), entry.file, math.inf, 0)
        for file in _leaves_first([*files, new]):
            if self._taken <= enough or file is new:
                break
            _remove(file.path)
            self._taken -= file.size
            with suppress(ValueError):
                self._removed.append((bytes.fromhex(file.path.parent.name), file.name))

    def _files(self) -> Iterator[_File]:
        for folder in self.directory.iterdir():
            with suppress(OSError), os.scandir(folder) as found:
                for item in found:
                    name = parsed(item.name)
                    with suppress(FileNotFoundError):
                        status = item.stat(follow_symlinks=False)
                        if name:
                            yield _File(folder / item.name, name, status.st_mtime, status.st_size)


def _leaves_first(files: list[_File]) -> Iterator[_File]:
    """Yield files by last use, but a node only after all nodes that follow it."""
    nodes: dict[tuple[Path, str], list[_File]] = {}
    behind: dict[tuple[Path, str], int] = {}
    for file in files:
        nodes.setdefault((file.path.parent, file.name.digest), []).append(file)
    parents = {key: (key[0], parts[0].name.parent) for key, parts in nodes.items()}
    for parent in parents.values():
        behind[parent] = behind.get(parent, 0) + 1
    used = {key: max(f.used for f in parts) for key, parts in nodes.items()}
    ready = [(used[key], str(key[0]), key[1]) for key in nodes if not behind.get(key)]
    heapq.heapify(ready)
    while ready:
        when, folder, digest = heapq.heappop(ready)
        key = Path(folder), digest
        yield from nodes[key]
        parent = parents[key]
        behind[parent] -= 1
        if parent in nodes and not behind[parent]:
            heapq.heappush(ready, (max(when, used[parent]), str(parent[0]), parent[1]))
    # A cycle of names, which this program did not write.
    yield from (file for key, parts in nodes.items() if behind.get(key) for file in parts)


def _write_all(descriptor: int, content: memoryview) -> None:
    content = content.cast("B")
    while content:
        content = content[os.write(descriptor, content) :]


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
    with suppress(OSError):
        path.parent.rmdir()


def _remove_if_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)
