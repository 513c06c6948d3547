"""Packed matrices in a file, mapped instead of read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from .native import WeightFile, in_use, native
from .packed import Packed, checked_precision

ALIGNMENT = 64


def packed_version() -> int | None:
    """A number that changes whenever `pack_gguf` lays matrices out differently. None where packed matrices cannot be mapped."""
    return native.packed_version if in_use() and native.can_map_weights() else None


def map_weights(descriptor: int) -> WeightFile:
    """Map an open file; its descriptor may be closed afterwards. The file must never be shortened or written to. Raises OSError."""
    return native.map_weights(descriptor)


def into_huge_pages(file: WeightFile, stop: Callable[[], bool] = lambda: False) -> None:
    """Copy what is mapped to memory of this process, in huge pages, at the same addresses: products are a tenth faster then.

    Takes some tenths of a second for a gigabyte. `stop` is asked before each piece of 16 MB (some milliseconds) and ends it early. Does
    a part, or nothing, where memory is short.
    """
    at = 0
    while at < file.size and not stop():
        at = native.into_huge_pages(file, at)


def preamble(nbytes: int) -> bytes:
    """The bytes that must precede a matrix of `nbytes` bytes in the file. The matrix begins at a multiple of `ALIGNMENT`."""
    return struct.pack("<56xQ", nbytes)


def mapped_gguf(file: WeightFile, offset: int, kind: str, shape: Sequence[int], *, precision: str | None = None) -> Packed:
    """A matrix as `pack_gguf` returns it, whose `data` is at byte `offset` of the file. Raises ValueError where the file has no such
    matrix there; its numbers are not checked."""
    precision = checked_precision(precision)
    data, layout = native.gguf_in(file, offset, kind, list(shape))
    return Packed(data, layout, None, precision)
