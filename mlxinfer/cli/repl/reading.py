"""Where the user's messages come from: a line editor on a terminal, or the lines of a pipe."""

from __future__ import annotations

import os
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
