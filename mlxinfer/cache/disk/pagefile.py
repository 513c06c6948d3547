"""Files of the prefix cache on disk: safetensors with a predictable header.

A reader does not parse a header that others may have written: it builds the expected header and compares. A file that is damaged, or of
another model or version, differs.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

VERSION = "mlxinfer prefix page 1"
SUFFIX = ".safetensors"

SIZES = {"F32": 4, "U32": 4, "F16": 2, "BF16": 2}
"""Bytes per number of the dtypes in pages and states."""

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([a-z]+[0-9]*)" + re.escape(SUFFIX))
_ALIGNMENT = 8
_NAME_BYTES = 16
"""Bytes of a digest in a file name; the header has the whole digest."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    """Name in the safetensors header."""
    dtype: str
    """Dtype in safetensors' notation, a key of `SIZES`."""
    shape: tuple[int, ...]
    """Shape without a pool's page axis."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


class DataLayout:
    """Consecutive tensors of a file."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.offsets = [0]
        for tensor in self.tensors:
            self.offsets.append(self.offsets[-1] + tensor.nbytes)
        self.nbytes = self.offsets[-1]

    @cached_property
    def described(self) -> str:
        """Tensors' part of the JSON header, without the outer braces."""
        found = {
            t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, start + t.nbytes]}
            for t, start in zip(self.tensors, self.offsets, strict=False)
        }
        return json.dumps(found, separators=(",", ":"))[1:-1]


@dataclass(frozen=True, slots=True)
class Name:
    """File name: the starts of both digests, and the part."""

    digest: str
    """First 16 bytes of the digest, hexadecimal."""
    parent: str
    """First 16 bytes of the parent's digest, hexadecimal."""
    part: str
    """See `Entry.part`."""

    def __str__(self) -> str:
        return f"{self.digest}-{self.parent}-{self.part}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Contents of a file: one part of a node, or a snapshot."""

    root: bytes
    """Digest of the chain's root, 32 bytes."""
    digest: bytes
    """Digest of the node or snapshot, 32 bytes."""
    parent: bytes
    part: str
    """Group of layers or snapshot: lower-case letters, then digits."""
    tokens: tuple[int, ...]
    """Tokens of the page or the open page."""
    layout: DataLayout
    """Tensors of the data."""

    @property
    def file(self) -> Name:
        """Name of the file."""
        return Name(shown(self.digest), shown(self.parent), self.part)

    def head(self, checksum: int) -> bytes:
        """Return all bytes before the data; the length is independent of the checksum."""
        about = {
            "format": VERSION,
            "root": self.root.hex(),
            "digest": self.digest.hex(),
            "parent": self.parent.hex(),
            "part": self.part,
            "tokens": ",".join(map(str, self.tokens)),
            "crc32": f"{checksum:08x}",
        }
        text = f'{{"__metadata__":{json.dumps(about, separators=(",", ":"))},{self.layout.described}}}'.encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def parsed(name: str) -> Name | None:
    """Parse a file name; None for any other name."""
    found = _NAME.fullmatch(name)
    return Name(*found.groups()) if found else None


def shown(digest: bytes) -> str:
    """Return the part of a digest in file names, hexadecimal."""
    return digest[:_NAME_BYTES].hex().ljust(2 * _NAME_BYTES, "0")


def checksum(data: np.ndarray) -> int:
    """Return the CRC-32, the fastest checksum in the standard library; it detects corruption, not tampering."""
    return zlib.crc32(data.data)


def read_into(path: Path, entry: Entry, data: np.ndarray) -> bool:
    """Fill `data`, uint8 `[entry.layout.nbytes]`; False unless the file equals the one written for the entry and this data.

    Raises OSError.
    """
    head = bytearray(len(entry.head(0)))
    # Do not follow a link or block on a pipe of another process.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(head) + data.nbytes:
            return False
        if not _fill(descriptor, memoryview(head)) or not _fill(descriptor, data.data):
            return False
    finally:
        os.close(descriptor)
    return entry.head(checksum(data)) == head


def _fill(descriptor: int, target: memoryview) -> bool:
    while target:
        count = os.readv(descriptor, [target])
        if not count:
            return False
        target = target[count:]
    return True
