"""Fixed texts of a format, found in a text that is still being written."""

from __future__ import annotations

import re
from functools import lru_cache

ID = "{id}"
"""Stands in a literal for a number or a call's id: a run of letters, digits and `_-.`, which means nothing here."""
KEY = "{key}"
"""Stands in a literal for the argument's name."""

MISS, MORE = -1, -2
_WHITESPACE = " \t\r\n"
_MOST_WHITESPACE = 64
_ID = re.compile(r"[\w.\-]{0,128}")
_PARTS = re.compile(rf"(\s+|{re.escape(ID)})")


class Literal:
    """A text to look for. Where it has whitespace any whitespace will do, and none. Immutable.

    `lead` and `trail` are the whitespace that it begins and ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lead = text[: len(text) - len(text.lstrip())]
        self.trail = text[len(text.rstrip()) :] if text.strip() else ""
        self._parts = tuple(part for part in _PARTS.split(text) if part)

    def match(self, text: str, at: int, final: bool) -> int:
        """Where it ends, if it begins at `at`; `MISS` if it does not, `MORE` if that depends on what follows the text. Nothing follows a
        `final` text."""
        size = len(text)
        for part in self._parts:
            if part == ID:
                end = _ID.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
                if end == size and not final and end - at < 128:
                    return MORE
                if end == at:
                    return MISS
                at = end
            elif part[0] in _WHITESPACE:
                at = skip_whitespace(text, at)
                if at == size and not final:
                    return MORE
            elif text.startswith(part, at):
                at += len(part)
            else:
                return MORE if not final and size - at < len(part) and part.startswith(text[at:]) else MISS
        return at

    def find(self, text: str, at: int, final: bool) -> tuple[int, int]:
        """(where it may begin, where it ends or `MORE`) for the first place from `at` on. (size, MISS) if it is nowhere."""
        first = self._parts[0]
        while True:
            at = text.find(first, at)
            if at < 0:
                break
            end = self.match(text, at, final)
            if end != MISS:
                return at, end
            at += 1
        held = 0 if final else overlap(text, first)
        return (len(text) - held, MORE) if held else (len(text), MISS)


literal = lru_cache(4096)(Literal)
"""A `Literal` of this text, made once."""


def skip_whitespace(text: str, at: int) -> int:
    """Where whitespace from `at` on ends; very long runs count as text."""
    end = at
    while end < len(text) and text[end] in _WHITESPACE and end - at < _MOST_WHITESPACE:
        end += 1
    return end


def overlap(text: str, literal: str) -> int:
    """Length of the longest end of `text` that `literal` begins with, without being all of it."""
    at = text.find(literal[0], max(0, len(text) - len(literal) + 1))
    while at >= 0 and not literal.startswith(text[at:]):
        at = text.find(literal[0], at + 1)
    return len(text) - at if at >= 0 else 0
