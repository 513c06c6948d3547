"""How a packed copy lies in its file.

A header (`_HEADER`), an index in JSON (`{"source": ..., "matrices": {key: offset}}`), and from the next page on the matrices, each behind
a preamble (`kernels_cpu.preamble`). The header has the sizes of the index and of the whole file, so that one that was cut is not believed.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...kernels_cpu import ALIGNMENT
from ..resolve import cache_dir

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


_HEADER = struct.Struct("<8sIIQQ")
"""Magic, version, CRC-32 of the index, bytes of the index, bytes of the file."""
_MAGIC, _VERSION = b"mlxipack", 1
_PAGE = 4096

Source = dict[str, Any]
"""What the copy was made from and for whom, in JSON's types: it holds for nothing else."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The beginning of a file, and where everything lies in it."""

    head: bytes
    offsets: Mapping[str, int]
    size: int


def plan(source: Source, sizes: Mapping[str, int]) -> Plan:
    """Place matrices of so many bytes."""
    # Offsets change the length of the index, which changes the offsets: they are counted from the end of the index.
    relative, at = {}, 0
    for key, size in sizes.items():
        relative[key] = at + ALIGNMENT
        at = _up(at + ALIGNMENT + size, ALIGNMENT)
    index = json.dumps({"source": source, "matrices": relative}).encode()
    base = _up(_HEADER.size + len(index), _PAGE)
    head = _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(index), len(index), base + at) + index
    return Plan(head.ljust(base, b"\0"), {key: base + offset for key, offset in relative.items()}, base + at)


def read_offsets(file: IO[bytes], file_size: int, source: Source) -> dict[str, int] | None:
    """Where each matrix begins, if this is a whole copy made from `source`; None for anything else. Raises OSError."""
    head = file.read(_HEADER.size)
    if len(head) != _HEADER.size:
        return None
    magic, version, checksum, index_size, size = _HEADER.unpack(head)
    if (magic, version, size) != (_MAGIC, _VERSION, file_size) or index_size > file_size:
        return None
    index = file.read(index_size)
    if zlib.crc32(index) != checksum:
        return None
    try:
        known = json.loads(index)
        if known["source"] != source:
            return None
        base = _up(_HEADER.size + index_size, _PAGE)
        offsets = {key: base + offset for key, offset in known["matrices"].items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return offsets if all(type(offset) is int and 0 <= offset <= file_size for offset in offsets.values()) else None


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
