"""Paths of packed copies, and the layout of a copy's file.

A header (`_HEADER`), an index in JSON (`{"source": ..., "matrices": {key: [offset, bytes, CRC-32]}}`), and from the next page on the
matrices, each after a preamble (`kernels_cpu.preamble`). The header has the sizes of the index and of the whole file, which reveals a
truncated file. It is written last: an unfinished file has no valid header.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ...kernels_cpu import ALIGNMENT
from ...util.cache_dir import cache_dir
from ...util.cache_files import UNFINISHED, cached_path, files_with_suffix, remove_abandoned, remove_least_recent
from ...util.dataclass import dataclass

LIMIT = "MLXINFER_PACKED_GB"
"""Environment variable: gigabytes for all copies together; 0 keeps none."""

SUFFIX = ".packed"
_DEFAULT_GB = 8.0


def directory() -> Path:
    return cache_dir() / "packed"


def limit_bytes() -> int:
    """Bytes that all copies together may take, by `MLXINFER_PACKED_GB`; 0 keeps none. A value that is not a number is ignored."""
    wanted = _DEFAULT_GB
    with suppress(ValueError):
        wanted = float(os.environ.get(LIMIT, "").strip() or wanted)
    return int(wanted * 1e9) if 0 < wanted < 1e9 else 0


def copy_path(model: Path) -> Path:
    """Path of a model's copy, one for each path of a model."""
    return cached_path(directory(), model, SUFFIX)


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Contents of the folder of packed copies."""

    copies: int
    """Count of finished copies."""
    copy_bytes: int
    unfinished: int
    """Count of copies that are being written, or that a process left: the next load of their model finishes them."""
    unfinished_bytes: int


def cache_usage() -> CacheUsage:
    copies, parts = ([size for _, _, size in files_with_suffix(directory(), suffix)] for suffix in (SUFFIX, UNFINISHED))
    return CacheUsage(len(copies), sum(copies), len(parts), sum(parts))


def kept_bytes() -> int:
    """Bytes of all finished copies."""
    return cache_usage().copy_bytes


def make_room(nbytes: int, instead_of: Path) -> bool:
    """Remove the least recently used copies until `nbytes` fit below the limit. False if they cannot fit, or if the disk would be left with
    less than `nbytes`. Raises OSError."""
    from shutil import disk_usage  # slow to import, and seldom needed

    remove_abandoned(directory())
    limit = limit_bytes()
    begun = sum(size for _, path, size in files_with_suffix(directory(), UNFINISHED) if path.stem == instead_of.stem)
    if nbytes > limit or disk_usage(directory()).free + begun < 2 * nbytes:
        return False
    remove_least_recent(directory(), SUFFIX, limit - nbytes, instead_of=instead_of)
    return True


_HEADER = struct.Struct("<8sIIQQ")
"""Magic, version, CRC-32 of the index, bytes of the index, bytes of the file."""
_MAGIC, _VERSION = b"mlxipack", 2
_PAGE = 4096

Source = dict[str, Any]
"""The files and kernels that a copy was made for, in JSON's types. A copy is valid for an equal source only."""


@dataclass(frozen=True, slots=True)
class Place:
    """One matrix in the file."""

    offset: int
    """First byte of the matrix, a multiple of `ALIGNMENT`."""
    nbytes: int
    checksum: int
    """CRC-32 of the preamble and the matrix."""


@dataclass(frozen=True, slots=True)
class CopyLayout:
    """Layout of a file that is about to be written."""

    source: Source
    offsets: Mapping[str, int]
    """First byte of each matrix, by its key."""
    sizes: Mapping[str, int]
    base: int
    """Bytes of the header and the index."""
    size: int

    def head(self, checksums: Mapping[str, int]) -> bytes:
        """The first `base` bytes of the file, given the checksum of each matrix."""
        index = _encoded_index(self.source, {key: at - self.base for key, at in self.offsets.items()}, self.sizes, checksums)
        header = _HEADER.pack(_MAGIC, _VERSION, zlib.crc32(index), len(index), self.size)
        return (header + index).ljust(self.base, b"\0")


def plan(source: Source, sizes: Mapping[str, int]) -> CopyLayout:
    """Place matrices of these sizes in bytes."""
    # Offsets change the length of the index, which changes the offsets: they are counted from the end of the index.
    relative, at = {}, 0
    for key, size in sizes.items():
        relative[key] = at + ALIGNMENT
        at = _round_up(at + ALIGNMENT + size, ALIGNMENT)
    base = _round_up(_HEADER.size + len(_encoded_index(source, relative, sizes, dict.fromkeys(sizes, 0))), _PAGE)
    return CopyLayout(source, {key: base + offset for key, offset in relative.items()}, dict(sizes), base, base + at)


def _encoded_index(source: Source, relative: Mapping[str, int], sizes: Mapping[str, int], checksums: Mapping[str, int]) -> bytes:
    """Encode the index. Checksums have a fixed length, so its size is known before them."""
    places = {key: [offset, sizes[key], f"{checksums[key]:08x}"] for key, offset in relative.items()}
    return json.dumps({"source": source, "matrices": places}).encode()


def read_places(file: IO[bytes], file_size: int, source: Source) -> dict[str, Place] | None:
    """Places of all matrices if this is a whole copy made from `source`, otherwise None. Raises OSError."""
    head = file.read(_HEADER.size)
    if len(head) != _HEADER.size:
        return None
    magic, version, checksum, index_size, size = _HEADER.unpack(head)
    if (magic, version, size) != (_MAGIC, _VERSION, file_size) or index_size > file_size:
        return None
    index = file.read(index_size)
    if zlib.crc32(index) != checksum:
        return None
    base = _round_up(_HEADER.size + index_size, _PAGE)
    try:
        known = json.loads(index)
        if known["source"] != source:
            return None
        places = {key: Place(base + offset, nbytes, int(crc, 16)) for key, (offset, nbytes, crc) in known["matrices"].items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return places if all(_is_inside(place, base, file_size) for place in places.values()) else None


def _is_inside(place: Place, base: int, file_size: int) -> bool:
    if type(place.offset) is not int or type(place.nbytes) is not int:
        return False
    return base + ALIGNMENT <= place.offset and place.nbytes >= 0 and place.offset + place.nbytes <= file_size


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
