"""The file of a packed copy: planned contents can be read back, and anything else is refused."""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.kernels_cpu import ALIGNMENT
from mlxinfer.loading.repack_cache.layout import Place, plan, read_places

SOURCE = {"packed": 1, "files": [["/a.gguf", 5, 6, 7]]}
SIZES = st.dictionaries(st.text(max_size=20), st.integers(0, 1 << 40), max_size=30)


def read(content: bytes, size: int, source: dict[str, Any] = SOURCE) -> dict[str, Place] | None:
    return read_places(io.BytesIO(content), size, source)


@pytest.mark.long
@given(SIZES)
def test_matrices_have_places_of_their_own(sizes: dict[str, int]) -> None:
    planned = plan(SOURCE, sizes)
    checksums = {key: number * 0x01234567 & 0xFFFFFFFF for number, key in enumerate(sizes)}
    places = {key: Place(planned.offsets[key], size, checksums[key]) for key, size in sizes.items()}
    head = planned.head(checksums)
    assert read(head, planned.size) == places
    assert len(head) == planned.base
    end = planned.base
    for key, offset in planned.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset >= end + ALIGNMENT
        end = offset + sizes[key]
    assert planned.size >= end


@pytest.mark.long
@given(SIZES, st.data())
def test_what_is_not_whole_is_no_copy(sizes: dict[str, int], data: st.DataObject) -> None:
    planned = plan(SOURCE, sizes)
    head = planned.head(dict.fromkeys(sizes, 0))
    assert read(head, planned.size - 1) is None
    assert read(head, planned.size, SOURCE | {"packed": 2}) is None
    used = len(head.rstrip(b"\0"))
    at = data.draw(st.integers(0, used - 1))
    assert read(head[:at], planned.size) is None
    changed = bytearray(head)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert read(bytes(changed), planned.size) is None


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    assert read(content, len(content)) is None


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, {"source": SOURCE}, {"source": SOURCE, "matrices": []}]
    + [{"source": SOURCE, "matrices": {"a": [offset, 1, "0"]}} for offset in (-10_000, 1 << 70, 1.5, "1", None, float("inf"))]
    + [{"source": SOURCE, "matrices": {"a": [8192, size, "0"]}} for size in (-1, 1 << 70, 1.5, "1", None)]
    + [{"source": SOURCE, "matrices": {"a": place}} for place in (8192, [8192], [8192, 1, 5], [8192, 1, "x"], [8192, 1, "0", 0])],
)
def test_an_index_that_says_something_else(index: Any) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    size = 100_000
    head = struct.pack("<8sIIQQ", b"mlxipack", 2, zlib.crc32(text), len(text), size)
    assert read(head + text, size) is None
