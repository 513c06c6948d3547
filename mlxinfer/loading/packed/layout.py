"""How a packed copy lies in its file.

A header (`_HEADER`), an index in JSON (`{"source": ..., "matrices": {key: offset}}`), and from the next page on the matrices, each behind
a preamble (`kernels_cpu.preamble`). The header has the sizes of the index and of the whole file, so that one that was cut is not believed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from ...kernels_cpu import ALIGNMENT

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
