"""Output of answers as rendered Markdown or raw text, and the keyboard during an answer."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, Protocol

from rich.cells import cell_len

from ..common.console import colours, dumb_terminal, printable
from ..common.waiting import StatusLine
from .conversation import Conversation
from .markdown import MarkdownStream

_WIDEST = 100
"""Maximum columns of an answer."""
_THINKING = "thinking… "


class AnswerWriter(Protocol):
    """Output of answers."""

    def begin(self, note: Callable[[], str]) -> None:
        """Start an answer; until its first text, show `note`."""
        ...

    def text(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None:
        """Show reasoning, which is not part of the answer."""
        ...

    def end(self) -> None: ...

    def message(self, text: str) -> None:
        """Show an earlier message of the user."""
        ...

    def aside(self, text: str) -> None:
        """Show an event between message and answer, such as a tool call."""
        ...


class PlainWriter:
    """Writes raw answers, each followed by a line break."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        self._last = "\n"

    def begin(self, note: Callable[[], str]) -> None:
        self._last = "\n"

    def reasoning(self, text: str) -> None:
        pass

    def text(self, text: str) -> None:
        _write(self._shown(text))
        self._last = text[-1:] or self._last

    def end(self) -> None:
        if self._last != "\n":
            _write("\n")

    def message(self, text: str) -> None:
        _write(self._shown(f"> {text}\n"))

    def aside(self, text: str) -> None:
        _write(self._shown(f"({text})\n"))


class TerminalWriter:
    """Renders Markdown while it arrives, with a status line before the first text.

    Reasoning is dim; folded, it is one line with the newest words and finally the duration.
    """

    def __init__(self, folded: Callable[[], bool] = lambda: False) -> None:
        self._stream = MarkdownStream(80)
        self._line = StatusLine()
        self._note: Callable[[], str] = str
        self._folded = folded
        self._thought = ""
        """Reasoning before the answer."""
        self._began = 0.0
        """Start of the reasoning, seconds of `perf_counter`."""

    def begin(self, note: Callable[[], str]) -> None:
        self._stream = MarkdownStream(min(shutil.get_terminal_size().columns, _WIDEST), colours=colours())
        self._note, self._thought = note, ""
        self._line.begin(self._what_goes_on)

    def reasoning(self, text: str) -> None:
        if not text:
            return
        self._began = self._began if self._thought else perf_counter()
        self._thought += text
        if not self._folded():
            self._line.write(f"\x1b[2m{printable(text)}\x1b[0m")

    def text(self, text: str) -> None:
        if text and self._thought:
            self._end_thought("\n")
        self._line.write(self._stream.feed(printable(text)))

    def end(self) -> None:
        self._line.stop()
        if self._thought:
            self._end_thought("")
        self._line.write(self._stream.close())
        self._line.end()

    def message(self, text: str) -> None:
        prompt = "\x1b[1;32m>\x1b[0m" if colours() else "\x1b[1m>\x1b[0m"
        _write(f"{prompt} {printable(text)}\n")

    def aside(self, text: str) -> None:
        _write(f"\x1b[2m{printable(text)}\x1b[0m\n")

    def _end_thought(self, between: str) -> None:
        """End the reasoning with a line break, and write `between` before the answer."""
        thought, self._thought = self._thought, ""
        if self._folded():
            words, seconds = len(thought.split()), perf_counter() - self._began
            self._line.write(f"\x1b[2mthought for {seconds:.0f} s: {words} words (/thinking shows them)\x1b[0m\n")
        else:
            self._line.write(between if thought.endswith("\n") else f"\n{between}")

    def _what_goes_on(self) -> str:
        if self._stream.table_rows:
            return f"writing a table, {self._stream.table_rows} rows…"
        if self._thought:
            width = min(shutil.get_terminal_size().columns, _WIDEST) - len(_THINKING) - 1
            return _THINKING + newest_words(printable(self._thought[-4 * _WIDEST :]), width)
        return self._note()


def newest_words(text: str, width: int) -> str:
    """Return the last words of a text that fit in `width` columns."""
    shown = ""
    for word in reversed(text.split()):
        longer = f"{word} {shown}".rstrip()
        if cell_len(longer) > width:
            break
        shown = longer
    return shown


def writer(folded: Callable[[], bool]) -> AnswerWriter:
    """Return the writer for standard output; `folded` returns True for one-line reasoning."""
    if not sys.stdout.isatty():
        return PlainWriter()
    return PlainWriter(printable) if dumb_terminal() else TerminalWriter(folded)


def meter(conversation: Conversation, cells: int = 12) -> str:
    """Return a bar and numbers for the use of the context."""
    share = _share(conversation)
    filled = min(round(share * cells), cells)
    return f"{'█' * filled}{'░' * (cells - filled)} {_context_numbers(conversation)}"


def bar(conversation: Conversation, width: int) -> str:
    """Return the meter with the model's name, shortened to `width` columns, in a warning colour if nearly full."""
    meters = [f" {conversation.name}  {meter(conversation)}", f" {meter(conversation)}", f" {_context_numbers(conversation)}"]
    shown = next((text for text in meters if len(text) <= width), f" {_share(conversation):.0%}")
    share = _share(conversation)
    return f"\x1b[31m{shown}\x1b[0m" if share >= 0.95 else f"\x1b[33m{shown}\x1b[0m" if share >= 0.8 else shown


def _share(conversation: Conversation) -> float:
    return conversation.context_used / conversation.context_size


def _context_numbers(conversation: Conversation) -> str:
    return f"{conversation.context_used} / {conversation.context_size} tokens ({_share(conversation):.0%})"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Keyboard:
    """Input during an answer: keys are not echoed, and stay for the next prompt."""

    def __init__(self) -> None:
        self._usual: list[Any] | None = None
        with suppress(termios.error, OSError, ValueError):
            self._usual = termios.tcgetattr(sys.stdin.fileno())

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """Suppress echo for the block; also after Ctrl-Z and `fg`."""
        before = signal.signal(signal.SIGCONT, lambda *_: self._hush())
        try:
            self._hush()
            yield
        finally:
            signal.signal(signal.SIGCONT, before)
            self.restore()

    def _hush(self) -> None:
        if self._usual is None:
            return
        attributes = list(self._usual)
        attributes[3] = attributes[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
        self._apply(attributes)

    def restore(self) -> None:
        """Restore the terminal's settings of the chat's start."""
        if self._usual is not None:
            self._apply(self._usual)

    def _apply(self, attributes: list[Any]) -> None:
        # In the background this would stop the process.
        with suppress(termios.error, OSError, ValueError):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, attributes)
