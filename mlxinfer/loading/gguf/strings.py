"""A GGUF file's array of strings, found and decoded all at once: one by one, a vocabulary takes as long as the rest of a model."""

from __future__ import annotations

import mmap

import numpy as np

_LENGTH = 8
"""Bytes of the length before each string."""
_LEAST, _GUESS = 64, 24
"""Bytes of a string with its length, in a vocabulary."""


def short_strings(buffer: mmap.mmap | bytes, at: int, count: int) -> tuple[list[str], int] | None:
    """The `count` strings from `at` on, and where they end. None for what is not this simple: strings that are empty, have 256 bytes or
    a zero byte in them, are cut, or are no UTF-8.

    Seven zero bytes in a row are then the upper ones of a length. That each length leads to the next one is checked for all.
    """
    if count < _LEAST:
        return None
    room = count * _GUESS
    while True:
        window = np.frombuffer(buffer, np.uint8, min(room, len(buffer) - at), at)
        starts = _lengths(window)
        # One more than needed shows that the window holds all of the last string.
        if len(starts) > count or len(window) < room:
            break
        room *= 2
    starts = starts[:count]
    if len(starts) < count or starts[0] != 0:
        return None
    ends = starts + _LENGTH + window[starts]
    if ends[-1] > len(window) or not np.array_equal(ends[:-1], starts[1:]):
        return None
    text = _joined(window[: ends[-1]], starts)
    strings = [] if text is None else text.split("\0")
    return (strings, at + int(ends[-1])) if len(strings) == count else None


def _lengths(window: np.ndarray) -> np.ndarray:
    """Where a byte is followed by seven zeros."""
    zero = window == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    return np.flatnonzero(four[1:-3] & four[4:])


def _joined(strings: np.ndarray, starts: np.ndarray) -> str | None:
    """With a zero between them, which no character of several bytes goes across; None for what is no UTF-8."""
    keep = np.ones(len(strings), bool)
    for byte in range(_LENGTH - 1):
        keep[starts + byte] = False
    try:
        return strings[keep][1:].tobytes().decode()
    except UnicodeDecodeError:
        return None
