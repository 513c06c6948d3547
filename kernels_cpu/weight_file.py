"""Packed matrices that lie in a file, and are mapped rather than read."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .interface import WeightFile
from .native import in_use, native
from .packed import Packed, checked_precision

ALIGNMENT = 64


def packed_version() -> int | None:
    """Changes with what `pack_gguf` makes of a matrix. None where packed matrices cannot be mapped."""
    return native().packed_version if in_use() and native().can_map_weights() else None


def map_weights(descriptor: int) -> WeightFile:
    """Map an open file, whose descriptor may be closed then. The file must never be shortened, nor written to. Raises OSError."""
    return native().map_weights(descriptor)


def into_huge_pages(file: WeightFile) -> None:
    """Copy what is mapped to memory of this process, in huge pages, where they are in use as before: products are a tenth faster then.
    Takes some tenths of a second for a gigabyte, or where memory is short, does a part or nothing."""
    native().into_huge_pages(file)


def preamble(nbytes: int) -> bytes:
    """What must stand in the file right before a matrix of so many bytes, which begins at a multiple of `ALIGNMENT`."""
    return struct.pack("<56xQ", nbytes)


def mapped_gguf(file: WeightFile, offset: int, kind: str, shape: Sequence[int], *, precision: str | None = None) -> Packed:
    """A matrix as `pack_gguf` makes it, from a file that has its `data` at `offset`. Raises ValueError where the file has no such
    matrix there; the numbers themselves are not looked at."""
    precision = checked_precision(precision)
    data, layout = native().gguf_in(file, offset, kind, list(shape))
    return Packed(data, layout, None, precision)
