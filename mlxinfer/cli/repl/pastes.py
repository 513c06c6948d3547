"""Long texts as a few characters: a message that is pasted, that comes back to the prompt, or that is shown again."""

from __future__ import annotations

import re

from prompt_toolkit.history import FileHistory, InMemoryHistory

LONG_LINES, LONG_CHARACTERS = 12, 2000
"""Above these a text is folded."""
_FIRST = 60
"""Characters of a folded message that are shown."""


def is_long(text: str) -> bool:
    """A text that would fill the screen."""
    return text.count("\n") >= LONG_LINES or len(text) > LONG_CHARACTERS


def size(text: str) -> str:
    """ "500 lines", or "2,400 characters" of a text with few lines."""
    lines = text.rstrip("\n").count("\n") + 1
    return f"{lines:,} lines" if lines > LONG_LINES else f"{len(text):,} characters"


def folded(text: str) -> str:
    """A message as it is shown again: the start of a long one, and its size."""
    if not is_long(text):
        return text
    first = text.strip().partition("\n")[0]
    return f"{first[:_FIRST].rstrip()}… [{size(text)}]"


class Pastes:
    """Long texts that stand in the line editor as `[500 lines]`."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """Text of each paste."""

    def fold(self, text: str) -> str:
        """Text for the line editor: the pasted text itself, or a mark for a long one."""
        if not is_long(text):
            return text
        mark, number = f"[{size(text)}]", 1
        while self._texts.get(mark, text) != text:
            number += 1
            mark = f"[{size(text)}, {number}]"
        self._texts[mark] = text
        return mark

    def unfold(self, text: str) -> str:
        """The text with everything that was folded in its place."""
        if not self._texts:
            return text
        return re.sub("|".join(map(re.escape, self._texts)), lambda found: self._texts[found.group()], text)

    def mark_before(self, text: str) -> str:
        """The mark that a text ends with; "" where there is none."""
        return next((mark for mark in self._texts if text.endswith(mark)), "")


class UnfoldedFileHistory(FileHistory):
    """Messages in a file, with everything that was folded in its place."""

    def __init__(self, filename: str, pastes: Pastes) -> None:
        self._pastes = pastes
        super().__init__(filename)

    def append_string(self, string: str) -> None:
        super().append_string(self._pastes.unfold(string))


class UnfoldedHistory(InMemoryHistory):
    """The same in memory."""

    def __init__(self, pastes: Pastes) -> None:
        self._pastes = pastes
        super().__init__()

    def append_string(self, string: str) -> None:
        super().append_string(self._pastes.unfold(string))
