"""How answers are shown: rendered Markdown on a terminal, plain text elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import Protocol

from ..text import printable
from .conversation import Conversation
from .markdown import MarkdownStream


class Writer(Protocol):
    def begin(self, note: str) -> None: ...
    def text(self, text: str) -> None: ...
    def end(self) -> None: ...


class PlainWriter:
    """The answer as it is, ended by a line break."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        self._last = "\n"

    def begin(self, note: str) -> None:
        self._last = "\n"

    def text(self, text: str) -> None:
        _write(self._shown(text))
        self._last = text[-1:] or self._last

    def end(self) -> None:
        if self._last != "\n":
            _write("\n")


class TerminalWriter:
    """Markdown as it comes; until the first text, a note of what is going on."""

    def __init__(self) -> None:
        self._stream = MarkdownStream(80)
        self._note = False

    def begin(self, note: str) -> None:
        self._stream = MarkdownStream(min(shutil.get_terminal_size().columns, 100))
        self._note = True
        _write(f"\x1b[2m{note}\x1b[0m")

    def text(self, text: str) -> None:
        self._emit(self._stream.feed(printable(text)))

    def end(self) -> None:
        self._emit(self._stream.close())
        self._erase_note()

    def _emit(self, text: str) -> None:
        if text:
            self._erase_note()
            _write(text)

    def _erase_note(self) -> None:
        if self._note:
            self._note = False
            _write("\r\x1b[K")


def writer() -> Writer:
    if not sys.stdout.isatty():
        return PlainWriter()
    return PlainWriter(printable) if os.environ.get("NO_COLOR") else TerminalWriter()


def meter(conversation: Conversation, cells: int = 12) -> str:
    """How full the context is: a bar, and numbers."""
    share = conversation.context_used / conversation.context_size
    filled = min(round(share * cells), cells)
    return f"{'█' * filled}{'░' * (cells - filled)} {conversation.context_used} / {conversation.context_size} tokens ({share:.0%})"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
