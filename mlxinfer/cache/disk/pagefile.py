"""One file of the disk tier: safetensors, and every byte of it but the data follows from what it has to be.

So a reader does not parse a header that others may have written: it makes the one that it expects and compares. A file that is torn,
altered, of another model or of another version differs somewhere.
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
"""Bytes of the dtypes that pages and states consist of."""

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([a-z]+[0-9]*)" + re.escape(SUFFIX))
_ALIGNMENT = 8
_NAME_BYTES = 16
"""Of a digest that a name shows; the header has all of them."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


class Layout:
    """The tensors of a file, one behind another."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.offsets = [0]
        for tensor in self.tensors:
            self.offsets.append(self.offsets[-1] + tensor.nbytes)
        self.nbytes = self.offsets[-1]

    @cached_property
    def described(self) -> str:
        """Its part of the header, without the braces around."""
        found = {
            t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, start + t.nbytes]}
            for t, start in zip(self.tensors, self.offsets, strict=False)
        }
        return json.dumps(found, separators=(",", ":"))[1:-1]


@dataclass(frozen=True, slots=True)
class Name:
    """What the name of a file says: the beginnings of both digests, and the part."""

    digest: str
    parent: str
    part: str

    def __str__(self) -> str:
        return f"{self.digest}-{self.parent}-{self.part}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one file holds: for the node `digest` behind `parent` in the chain of `root`, the `part` of what is kept for its `tokens`.

    A part is a group of layers or a snapshot: lower case letters, then digits.
    """

    root: bytes
    digest: bytes
    parent: bytes
    part: str
    tokens: tuple[int, ...]
    layout: Layout

    @property
    def file(self) -> Name:
        return Name(shown(self.digest), shown(self.parent), self.part)

    def head(self, checksum: int) -> bytes:
        """All that lies before the data, of the same length for every checksum."""
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
    """None for the name of anything else."""
    found = _NAME.fullmatch(name)
    return Name(*found.groups()) if found else None


def shown(digest: bytes) -> str:
    """What names show of a digest."""
    return digest[:_NAME_BYTES].hex().ljust(2 * _NAME_BYTES, "0")


def checksum(data: np.ndarray) -> int:
    """CRC-32: against accidents, as the fastest that Python has itself. Nothing that is open to everybody stops one who forges."""
    return zlib.crc32(data.data)


def read_into(path: Path, entry: Entry, data: np.ndarray) -> bool:
    """Fill `data`, uint8 `[entry.layout.nbytes]`; False if the file is not, byte for byte, what would be written for the entry and
    this data. Raises OSError."""
    head = bytearray(len(entry.head(0)))
    # What another has laid there, a link or a pipe, is not followed and not waited for.
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
