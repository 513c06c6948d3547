"""Limit on the digits of a JSON number: small models may otherwise repeat digits until `max_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_DIGITS = 24
"""Digits before the decimal point and after it. A double needs 17; JavaScript writes up to 21 before the point and 23 after it."""
MOST_EXPONENT_DIGITS = 3
"""Digits of an exponent; a double's range is -324 to 308."""

_OUTSIDE, _IN_STRING, _ESCAPED, _IN_EXPONENT = range(4)
_DIGITS = frozenset(b"0123456789")

LexerState = tuple[int, int]
"""(mode: outside, in a string or in an exponent; digits in a row) at a position of a JSON text."""
BEGINNING: LexerState = (_OUTSIDE, 0)


class NumberLimit:
    """Limits the digits of numbers over one vocabulary. Strings, and states in which only digits may follow, are not limited."""

    def __init__(self, pieces: Sequence[bytes], vocab_size: int) -> None:
        """Create a limit; `pieces` are the bytes of each token, `vocab_size` the number of logits."""
        self._pieces = pieces
        self._begins_with_digit = np.zeros((vocab_size + 31) // 32 * 32, bool)
        self._begins_with_digit[[i for i, piece in enumerate(pieces[:vocab_size]) if piece and piece[0] in _DIGITS]] = True
        self._others = ~np.packbits(self._begins_with_digit, bitorder="little").view(np.int32)

    def after(self, place: LexerState, token: int) -> LexerState:
        """Return the state after one more token."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        mode, digits = place
        if mode == _IN_STRING and b'"' not in piece and b"\\" not in piece:
            return place
        for byte in piece:
            mode, digits = _next(mode, digits, byte)
        return mode, digits

    def allows(self, place: LexerState, token: int) -> bool:
        """Return True if the number of digits allows this token."""
        return not (_is_full(place) and self._begins_with_digit[token])

    def apply(self, place: LexerState, bits: np.ndarray) -> None:
        """Remove digits from a mask, int32 `[vocab / 32]`, if the number is full and another token may follow."""
        if _is_full(place):
            others = bits & self._others
            if others.any():
                bits[:] = others


def in_string(place: LexerState) -> bool:
    """Return True inside of a string."""
    return place[0] in (_IN_STRING, _ESCAPED)


def _is_full(place: LexerState) -> bool:
    mode, digits = place
    return digits >= (MOST_EXPONENT_DIGITS if mode == _IN_EXPONENT else MOST_DIGITS)


def _next(mode: int, digits: int, byte: int) -> LexerState:
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
