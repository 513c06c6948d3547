"""Markdown within a line: emphasis, code and escapes, as styled pieces of text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPABLE = set("\\`*_{}[]()#+-.!~|>")
_STYLES = {"***": ("bold", "italic"), "**": ("bold",), "__": ("bold",), "*": ("italic",), "_": ("italic",), "~~": ("strike",)}
_OPENING = re.compile(r"`+|\*{1,3}|_{1,2}|~~")

LONGEST_SPAN = 400
"""Characters after which an emphasis that was not closed is taken for plain text."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    styles: frozenset[str]


def pieces(text: str, *, final: bool, styles: frozenset[str] = frozenset()) -> tuple[list[Piece], str]:
    """The styled pieces of a text, and its end that more text may still turn into something else (empty if `final`)."""
    found: list[Piece] = []
    plain, at = "", 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text) and text[at + 1] in _ESCAPABLE:
            plain, at = plain + text[at + 1], at + 2
            continue
        opening = _OPENING.match(text, at)
        if not opening or not _opens(text, at, opening.group()):
            step = opening.group() if opening else text[at]
            plain, at = plain + step, at + len(step)
            continue
        mark = opening.group()
        end = _closing(text, opening.end(), mark)
        if end is None:
            if not final and len(text) - at < LONGEST_SPAN:
                return _with_plain(found, plain, styles), text[at:]
            plain, at = plain + mark, opening.end()
            continue
        found = _with_plain(found, plain, styles)
        found += _inside(mark, text[opening.end() : end], styles)
        plain, at = "", end + len(mark)
    return _with_plain(found, plain, styles), ""


def _with_plain(found: list[Piece], text: str, styles: frozenset[str]) -> list[Piece]:
    return [*found, Piece(text, styles)] if text else found


def _inside(mark: str, text: str, styles: frozenset[str]) -> list[Piece]:
    if mark[0] == "`":
        code = text[1:-1] if len(text) > 2 and text[0] == text[-1] == " " else text
        return [Piece(code, styles | {"code"})]
    return pieces(text, final=True, styles=styles | set(_STYLES[mark]))[0]


def _opens(text: str, at: int, mark: str) -> bool:
    """A mark opens before something that is no space; emphasis does not open inside a word (snake_case, 2*3)."""
    if mark[0] == "`":
        return True
    after = text[at + len(mark) : at + len(mark) + 1]
    return bool(after) and not after.isspace() and not text[at - 1 : at].isalnum()


def _closing(text: str, start: int, mark: str) -> int | None:
    """Where the same mark closes again, and not just as part of a longer run of its character."""
    for found in re.finditer(rf"(?<!{re.escape(mark[0])}){re.escape(mark)}(?!{re.escape(mark[0])})", text[start:]):
        at = start + found.start()
        if mark[0] == "`":
            return at
        before, after = text[at - 1], text[at + len(mark) : at + len(mark) + 1]
        if at > start and not before.isspace() and before != "\\" and not after.isalnum():
            return at
    return None
