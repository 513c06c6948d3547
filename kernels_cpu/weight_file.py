"""Packed matrices in a file, mapped into memory rather than read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from .interface import WeightFile
from .native import in_use, native
from .packed import Packed, checked_precision

ALIGNMENT = 64


def packed_version() -> int | None:
    """Changes whenever the output of `pack_gguf` changes. None if packed matrices cannot be mapped."""
    return native().packed_version if in_use() and native().can_map_weights() else None


def map_weights(descriptor: int) -> WeightFile:
    """Map an open file, whose descriptor may be closed afterwards. The file must never be shortened or written to. Raises OSError."""
    return native().map_weights(descriptor)


def into_huge_pages(file: WeightFile, stop: Callable[[], bool] = lambda: False) -> None:
    """Copy the mapped file into memory of this process, in huge pages, without changing its addresses: products are a tenth faster then.
    Takes some tenths of a second per gigabyte; if memory is short, it copies only a part or nothing."""
    at = 0
    while at < file.size and not stop():
        at = native().into_huge_pages(file, at)


def preamble(nbytes: int) -> bytes:
    """The bytes that must directly precede a matrix of this size, which begins at a multiple of `ALIGNMENT`."""
    return struct.pack("<56xQ", nbytes)


def mapped_gguf(file: WeightFile, offset: int, kind: str, shape: Sequence[int], *, precision: str | None = None) -> Packed:
    """A matrix as made by `pack_gguf`, from a file that has its `data` at `offset`. Raises ValueError if the file does not have such a
    matrix there; the numbers themselves are not checked."""
    precision = checked_precision(precision)
    data, layout = native().gguf_in(file, offset, kind, list(shape))
    return Packed(data, layout, None, precision)
