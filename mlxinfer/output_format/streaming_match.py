"""Matches a format's literals in text that is still being generated."""

from __future__ import annotations

import re
from functools import lru_cache

ID = "{id}"
"""Placeholder in a literal for a call's number or id: a run of letters, digits and `_-.`, which is ignored."""
KEY = "{key}"
"""Placeholder in a literal for the argument's name."""

MISS, MORE = -1, -2
_WHITESPACE = " \t\r\n"
_MOST_WHITESPACE = 64
_ID = re.compile(r"[\w.\-]{0,128}")
_PARTS = re.compile(rf"(\s+|{re.escape(ID)})")


class Literal:
    """An immutable text to search for. Its whitespace matches any whitespace, including none.

    `lead` and `trail` are the whitespace at its start and end.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lead = text[: len(text) - len(text.lstrip())]
        self.trail = text[len(text.rstrip()) :] if text.strip() else ""
        self._parts = tuple(part for part in _PARTS.split(text) if part)

    def match(self, text: str, at: int, final: bool) -> int:
        """Return the end of a match at `at`, `MISS`, or `MORE` if later text decides. Nothing follows a `final` text."""
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
        """Return (start, end or `MORE`) of the first match at or after `at`; (size of the text, `MISS`) if not found."""
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
"""Cached constructor of `Literal`."""


def skip_whitespace(text: str, at: int) -> int:
    """Return the end of the whitespace at `at`; very long runs count as text."""
    end = at
    while end < len(text) and text[end] in _WHITESPACE and end - at < _MOST_WHITESPACE:
        end += 1
    return end


def overlap(text: str, literal: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `literal`."""
    at = text.find(literal[0], max(0, len(text) - len(literal) + 1))
    while at >= 0 and not literal.startswith(text[at:]):
        at = text.find(literal[0], at + 1)
    return len(text) - at if at >= 0 else 0
