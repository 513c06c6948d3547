"""How long a number in JSON may get: a small model that may go on with digits does so until `max_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_DIGITS = 24
"""Digits before the point of a number, and after it. A double needs 17; JavaScript writes up to 21 before the point and 23 after it."""
MOST_EXPONENT_DIGITS = 3
"""Digits of an exponent: those of a double reach from -324 to 308."""

_OUTSIDE, _IN_STRING, _ESCAPED, _IN_EXPONENT = range(4)
_DIGITS = frozenset(b"0123456789")

Place = tuple[int, int]
"""Where a text of JSON stands: outside or inside a string or an exponent, and the digits in a row before that."""
BEGINNING: Place = (_OUTSIDE, 0)


class NumberLimit:
    """The digits of numbers, over the tokens of one vocabulary. Strings are left alone, and so is what only digits can go on with."""

    def __init__(self, pieces: Sequence[bytes], vocab_size: int) -> None:
        """`pieces`: the bytes of each token; `vocab_size`: logits of the model."""
        self._pieces = pieces
        self._begins_with_digit = np.zeros((vocab_size + 31) // 32 * 32, bool)
        self._begins_with_digit[[i for i, piece in enumerate(pieces[:vocab_size]) if piece and piece[0] in _DIGITS]] = True
        self._others = ~np.packbits(self._begins_with_digit, bitorder="little").view(np.int32)

    def after(self, place: Place, token: int) -> Place:
        """Where the text stands after one more token."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        mode, digits = place
        if mode == _IN_STRING and b'"' not in piece and b"\\" not in piece:
            return place
        for byte in piece:
            mode, digits = _next(mode, digits, byte)
        return mode, digits

    def allows(self, place: Place, token: int) -> bool:
        """Whether this token may come here, as far as the number of digits goes."""
        return not (_is_full(place) and self._begins_with_digit[token])

    def apply(self, place: Place, bits: np.ndarray) -> None:
        """Take digits out of the bits of what may follow, int32 `[vocab / 32]`, where there are enough of them and something else may."""
        if _is_full(place):
            others = bits & self._others
            if others.any():
                bits[:] = others


def in_string(place: Place) -> bool:
    """Whether a string has begun and not ended."""
    return place[0] in (_IN_STRING, _ESCAPED)


def _is_full(place: Place) -> bool:
    mode, digits = place
    return digits >= (MOST_EXPONENT_DIGITS if mode == _IN_EXPONENT else MOST_DIGITS)


def _next(mode: int, digits: int, byte: int) -> Place:
    if mode == _ESCAPED:
        return _IN_STRING, 0
    if mode == _IN_STRING:
        return (_ESCAPED if byte == 0x5C else _OUTSIDE if byte == 0x22 else _IN_STRING), 0
    if byte in _DIGITS:
        return mode, digits + 1
    if byte == 0x22:
        return _IN_STRING, 0
    if byte in b"eE" and digits:
        return _IN_EXPONENT, 0
    return (mode if byte in b"+-" else _OUTSIDE), 0
