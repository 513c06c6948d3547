"""Strings that are read all at once equal those read one by one; otherwise the fast way declines."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.loading.gguf.reader import short_strings

TEXTS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40), min_size=64, max_size=100
)


def encoded(texts: list[str] | list[bytes]) -> bytes:
    data = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return b"".join(struct.pack("<Q", len(text)) + text for text in data)


@given(TEXTS, st.binary(max_size=30), st.one_of(st.binary(max_size=300), st.integers(0, 300).map(bytes)))
def test_any_texts_between_any_bytes(texts: list[str], before: bytes, after: bytes) -> None:
    region = encoded(texts)
    found = short_strings(before + region + after, len(before), len(texts))
    assert found == (texts, len(before) + len(region))


@pytest.mark.parametrize("texts", [["a" * 200] * 300, ["a"] * 64 + ["b" * 255] * 500, [chr(256 + i) * 9 for i in range(3000)]])
def test_long_and_short(texts: list[str]) -> None:
    region = encoded(texts)
    assert short_strings(region, 0, len(texts)) == (texts, len(region))


@given(TEXTS, st.sampled_from([b"", b"\0", b"a\0b", bytes(9), b"\xff", b"\xc3", b"x" * 256, b"x" * 70_000]), st.data())
def test_what_is_not_simple_is_right_or_left(texts: list[str], odd: bytes, data: st.DataObject) -> None:
    rows = [text.encode() for text in texts]
    rows.insert(data.draw(st.integers(0, len(rows))), odd)
    region = encoded(rows)
    found = short_strings(region, 0, len(rows))
    assert found is None or ([text.encode() for text in found[0]], found[1]) == (rows, len(region))


@given(TEXTS, st.integers(1, 50))
def test_a_cut_region(texts: list[str], missing: int) -> None:
    region = encoded(texts)
    assert short_strings(region[:-missing], 0, len(texts)) is None


def test_half_a_character_in_each_of_two_texts_is_no_text() -> None:
    rows = [b"ab"] * 64 + [b"\xc3", b"\xa9"]
    assert short_strings(encoded(rows), 0, len(rows)) is None
