"""The file of a packed copy: what is planned can be read back, and nothing else is believed."""

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
from mlxinfer.loading.repack_cache.layout import plan, read_offsets

SOURCE = {"packed": 1, "files": [["/a.gguf", 5, 6, 7]]}
SIZES = st.dictionaries(st.text(max_size=20), st.integers(0, 1 << 40), max_size=30)


def read(content: bytes, size: int, source: dict[str, Any] = SOURCE) -> dict[str, int] | None:
    return read_offsets(io.BytesIO(content), size, source)


@given(SIZES)
def test_matrices_have_places_of_their_own(sizes: dict[str, int]) -> None:
    planned = plan(SOURCE, sizes)
    assert read(planned.head, planned.size) == planned.offsets
    end = len(planned.head)
    for key, offset in planned.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset >= end + ALIGNMENT
        end = offset + sizes[key]
    assert planned.size >= end


@given(SIZES, st.data())
def test_what_is_not_whole_is_no_copy(sizes: dict[str, int], data: st.DataObject) -> None:
    planned = plan(SOURCE, sizes)
    assert read(planned.head, planned.size - 1) is None
    assert read(planned.head, planned.size, SOURCE | {"packed": 2}) is None
    used = len(planned.head.rstrip(b"\0"))
    at = data.draw(st.integers(0, used - 1))
    assert read(planned.head[:at], planned.size) is None
    changed = bytearray(planned.head)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert read(bytes(changed), planned.size) is None


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    assert read(content, len(content)) is None


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, {"source": SOURCE}, {"source": SOURCE, "matrices": []}]
    + [{"source": SOURCE, "matrices": {"a": offset}} for offset in (-10_000, 1 << 70, 1.5, "1", None, float("inf"))],
)
def test_an_index_that_says_something_else(index: Any) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    size = 100_000
    head = struct.pack("<8sIIQQ", b"mlxipack", 1, zlib.crc32(text), len(text), size)
    assert read(head + text, size) is None
