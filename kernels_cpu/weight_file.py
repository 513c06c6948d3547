"""Packed matrices in a memory-mapped file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from .native import WeightFile, in_use, native
from .packed import Packed, checked_precision

ALIGNMENT = 64


def packed_version() -> int | None:
    """Version of the layout that `pack_gguf` writes. None if packed matrices cannot be mapped."""
    return native.packed_version if in_use() and native.can_map_weights() else None


def map_weights(descriptor: int) -> WeightFile:
    """Map an open file. The descriptor may be closed afterwards; the file must never be shortened or written to. Raises OSError."""
    return native.map_weights(descriptor)


def into_huge_pages(file: WeightFile, stop: Callable[[], bool] = lambda: False) -> None:
    """Copy the mapped bytes to memory of this process, in huge pages, at the same addresses. This makes products a tenth faster.

    Takes some tenths of a second per gigabyte. `stop` is called before each piece of 16 MB (some milliseconds); True ends the copy. If
    memory is short, only a part is copied, or nothing.
    """
    at = 0
    while at < file.size and not stop():
        at = native.into_huge_pages(file, at)


def preamble(nbytes: int) -> bytes:
    """The bytes that must precede a matrix of `nbytes` bytes in the file. The matrix starts at a multiple of `ALIGNMENT`."""
    return struct.pack("<56xQ", nbytes)


def mapped_gguf(file: WeightFile, offset: int, kind: str, shape: Sequence[int], *, precision: str | None = None) -> Packed:
    """A matrix as `pack_gguf` returns it, whose `data` is at byte `offset` of the file. Raises ValueError if the file does not have
    such a matrix there. The numbers are not checked."""
    precision = checked_precision(precision)
    data, layout = native.gguf_in(file, offset, kind, list(shape))
    return Packed(data, layout, None, precision)
