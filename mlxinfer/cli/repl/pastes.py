"""Folds long texts: pasted, edited again, or shown again."""

from __future__ import annotations

import re

from prompt_toolkit.history import FileHistory, InMemoryHistory

LONG_LINES, LONG_CHARACTERS = 12, 2000
"""Lines and characters above which a text is folded."""
_FIRST = 60
"""Shown characters of a folded message."""


def is_long(text: str) -> bool:
    """Return True for a text that fills the screen."""
    return text.count("\n") >= LONG_LINES or len(text) > LONG_CHARACTERS


def size(text: str) -> str:
    """Return "500 lines", or "2,400 characters" for a text with few lines."""
    lines = text.rstrip("\n").count("\n") + 1
    return f"{lines:,} lines" if lines > LONG_LINES else f"{len(text):,} characters"


def folded(text: str) -> str:
    """Return a message for display: the start of a long one, and its size."""
    if not is_long(text):
        return text
    first = text.strip().partition("\n")[0]
    return f"{first[:_FIRST].rstrip()}… [{size(text)}]"


class Pastes:
    """Long texts shown in the line editor as `[500 lines]`."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """Text of each mark."""

    def fold(self, text: str) -> str:
        """Return the text for the line editor: the text itself, or a mark for a long one."""
        if not is_long(text):
            return text
        mark, number = f"[{size(text)}]", 1
        while self._texts.get(mark, text) != text:
            number += 1
            mark = f"[{size(text)}, {number}]"
        self._texts[mark] = text
        return mark

    def unfold(self, text: str) -> str:
        """Return the text with each mark replaced by its paste."""
        if not self._texts:
            return text
        return re.sub("|".join(map(re.escape, self._texts)), lambda found: self._texts[found.group()], text)

    def mark_before(self, text: str) -> str:
        """Return the mark at the end of a text, or ""."""
        return next((mark for mark in self._texts if text.endswith(mark)), "")


class UnfoldedFileHistory(FileHistory):
    """History file with unfolded messages."""

    def __init__(self, filename: str, pastes: Pastes) -> None:
        self._pastes = pastes
        super().__init__(filename)

    def append_string(self, string: str) -> None:
        super().append_string(self._pastes.unfold(string))


class UnfoldedHistory(InMemoryHistory):
    """History in memory with unfolded messages."""

    def __init__(self, pastes: Pastes) -> None:
        self._pastes = pastes
        super().__init__()

    def append_string(self, string: str) -> None:
        super().append_string(self._pastes.unfold(string))
