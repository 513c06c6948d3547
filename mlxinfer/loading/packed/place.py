"""Where packed copies lie, and how much room they may take."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..paths import cache_dir

LIMIT = "MLXINFER_PACKED_GB"
"""Gigabytes that all copies together may take; 0 keeps none."""

SUFFIX, UNFINISHED = ".packed", ".part"
_DEFAULT_GB = 8.0
_ABANDONED_S = 3600.0
"""So old an unfinished file belongs to a process that has ended."""


def directory() -> Path:
    return cache_dir() / "packed"


def limit_bytes() -> int:
    """0 where nothing is to be kept. What is no number is as if it were not there."""
    wanted = _DEFAULT_GB
    with suppress(ValueError):
        wanted = float(os.environ.get(LIMIT, "").strip() or wanted)
    return int(wanted * 1e9) if 0 < wanted < 1e9 else 0


def copy_path(model: Path) -> Path:
    """The one place of the copy of a model: that of another file of this name replaces it."""
    # Two paths with one checksum would only replace each other's copies: each says itself what it was made from.
    checksum = zlib.crc32(os.fsencode(os.path.realpath(model)))
    return directory() / f"{model.stem[:40]}-{checksum:08x}{SUFFIX}"


def kept_bytes() -> int:
    """What all copies take."""
    return sum(size for _, _, size in _copies())


def make_room(nbytes: int, instead_of: Path) -> bool:
    """Remove the copies that have not been used for longest until there is room for another one; False where there will be none.

    As much again stays free on the disk. Raises OSError.
    """
    from shutil import disk_usage  # slow to import, and seldom needed

    _remove_abandoned()
    limit = limit_bytes()
    if nbytes > limit or disk_usage(directory()).free < 2 * nbytes:
        return False
    others = sorted(copy for copy in _copies() if copy[1] != instead_of)
    taken = sum(size for _, _, size in others)
    for _, path, size in others:
        if taken + nbytes <= limit:
            break
        path.unlink(missing_ok=True)
        taken -= size
    return True


def mark_used(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def _copies() -> Iterator[tuple[float, Path, int]]:
    """When each was last used, where it is, and its size."""
    for path in directory().glob(f"*{SUFFIX}"):
        with suppress(OSError):
            found = path.stat()
            yield found.st_mtime, path, found.st_size


def _remove_abandoned() -> None:
    for path in directory().glob(f"*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
