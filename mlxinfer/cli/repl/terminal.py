"""Where the user's messages come from: a line editor on a terminal, or the lines of a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from ..console import printable
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


QUOTES = '"""'


class Reader(Protocol):
    def read(self) -> str:
        """The next message. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        ...


class PipeReader:
    """A message a line; several lines between triple quotes."""

    def read(self) -> str:
        line = self._line()
        if not line.startswith(QUOTES):
            return line
        text = line[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self._line()
        return unquoted(QUOTES + text)

    def _line(self) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class TerminalReader:
    """A line editor with history, completion of commands, and a bar below that tells how full the context is."""

    def __init__(self, commands: Iterable[str], bar: Callable[[], str], history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=ANSI("\x1b[1;32m>\x1b[0m "),
            multiline=True,
            prompt_continuation=ANSI("\x1b[2m·\x1b[0m "),
            history=_private_history(history),
            completer=_CommandCompleter(commands),
            complete_while_typing=True,
            key_bindings=_keys(),
            bottom_toolbar=lambda: ANSI(f"\x1b[0m{bar()}"),
        )

    def read(self) -> str:
        return unquoted(self._session.prompt())


def unquoted(text: str) -> str:
    stripped = text.strip()
    if len(stripped) >= 2 * len(QUOTES) and stripped.startswith(QUOTES) and stripped.endswith(QUOTES):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def _private_history(path: Path) -> History:
    """The history file, which only its owner may read; in memory where it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.document.text_before_cursor
        if text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) == 1:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _CommandCompleter(Completer):
    def __init__(self, commands: Iterable[str]) -> None:
        self._commands = sorted(commands)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, argument = text.partition(" ")
        if space and name in ("/save", "/load"):
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif text.startswith("/") and not space:
            yield from (Completion(c, start_position=-len(text)) for c in self._commands if c.startswith(text))
