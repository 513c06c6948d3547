"""Large files of a cache, which can be made again: their names, last use, unfinished copies, and the lock of their writer.

`NAME.checked` records that the checksums of a finished file were verified, with the file's stamp. `NAME.part` is an unfinished file.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .plain_file import file_stamp

UNFINISHED, CHECKED = ".part", ".checked"
_ABANDONED_S = 86400.0
"""Seconds after which an unfinished file is removed. Until then the next load of its model continues it."""


def cached_path(folder: Path, model: Path, suffix: str) -> Path:
    """Path in `folder` of the file that is made from a model, one for each path of a model."""
    # Two paths with one checksum would only replace each other's files: each file names its source.
    checksum = zlib.crc32(os.fsencode(os.path.realpath(model)))
    return folder / f"{model.stem[:40]}-{checksum:08x}{suffix}"


def is_checked(path: Path) -> bool:
    """True if the file's checksums were verified and the file is unchanged since. Records the use of the file."""
    checked = path.with_suffix(CHECKED)
    try:
        if checked.read_text(encoding="utf-8") != _stamp_and_inode(path):
            return False
        os.utime(checked)
    except (OSError, ValueError):
        return False
    return True


def mark_safe(path: Path) -> None:
    """Sync a file to the disk and let later loads trust it; this process has verified its checksums. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    mark_checked(path)


def mark_checked(path: Path) -> None:
    """Record that the file's checksums are right. Raises OSError."""
    path.with_suffix(CHECKED).write_text(_stamp_and_inode(path), encoding="utf-8")


def _stamp_and_inode(path: Path) -> str:
    return json.dumps([*file_stamp(path), path.stat().st_ino])


def files_with_suffix(folder: Path, suffix: str) -> Iterator[tuple[float, Path, int]]:
    """Time of the last change, path and size of each file with this suffix."""
    for path in folder.glob(f"*{suffix}"):
        with suppress(OSError):
            found = path.stat()
            yield found.st_mtime, path, found.st_size


def remove_abandoned(folder: Path) -> None:
    """Remove unfinished files that no process has written to for a day."""
    for changed, path, _ in files_with_suffix(folder, UNFINISHED):
        if time.time() - changed > _ABANDONED_S:
            with suppress(OSError):
                path.unlink()


def remove_least_recent(folder: Path, suffix: str, limit: float, *, instead_of: Path) -> None:
    """Remove the least recently used files with this suffix until the others take at most `limit` bytes. The file `instead_of` neither
    counts nor is removed. Raises OSError."""
    others = sorted((_last_use(path), path, size) for _, path, size in files_with_suffix(folder, suffix) if path != instead_of)
    taken = sum(size for _, _, size in others)
    for _, path, size in others:
        if taken <= limit:
            break
        path.unlink(missing_ok=True)
        path.with_suffix(CHECKED).unlink(missing_ok=True)
        taken -= size


def _last_use(path: Path) -> float:
    """Time of a file's last use."""
    try:
        return path.with_suffix(CHECKED).stat().st_mtime
    except OSError:
        return path.stat().st_mtime


@contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Descriptor of an unfinished file, or None if another process writes it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # The process that had the lock may have renamed its file to the finished one.
        free = _try_lock(descriptor) and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        yield descriptor if free else None
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    import fcntl  # most starts write nothing

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
