"""Readers of the user's messages: a line editor on a terminal, or the lines of a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from ...errors import PromptError
from ..common.console import as_text
from .conversation import SETTABLE
from .pastes import Pastes, UnfoldedFileHistory, UnfoldedHistory
from .saved import Archive

_ROWS_FOR_MENU = 10
"""Minimum rows of a terminal for suggestions below the input line."""


QUOTES = '"""'


class Reader(Protocol):
    """Source of messages."""

    def read(self, draft: str = "") -> str:
        """Return the next message; `draft` is the initial text of an editor.

        Raises EOFError at the end, KeyboardInterrupt for Ctrl-C, and `PromptError` for an invalid message.
        """
        ...


class PipeReader:
    """Reads one message per line, or several lines between triple quotes. Shows a prompt on a terminal without line editing."""

    def __init__(self, prompt: str = "") -> None:
        self._prompt = prompt
        self._number = 0

    def read(self, draft: str = "") -> str:
        if self._prompt:
            sys.stdout.write(self._prompt)
            sys.stdout.flush()
        line = self._line()
        if not line.startswith(QUOTES):
            return line
        text, first = line[len(QUOTES) :], self._number
        while not text.rstrip().endswith(QUOTES):
            try:
                text += "\n" + self._line()
            except EOFError:
                raise PromptError(f"line {first}: the message has no triple quotes at its end") from None
        return unquoted(QUOTES + text)

    def _line(self) -> str:
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        self._number += 1
        return as_text(line, f"line {self._number}").rstrip("\r\n")


class TerminalReader:
    """Line editor with history, completion, and a bar with the use of the context."""

    def __init__(self, commands: Iterable[str], bar: Callable[[], str], history: Path) -> None:
        self._pastes = Pastes()
        self._session: PromptSession[str] = PromptSession(
            message=ANSI("\x1b[1;32m>\x1b[0m "),
            multiline=True,
            prompt_continuation=ANSI("\x1b[2m·\x1b[0m "),
            history=_private_history(history, self._pastes),
            completer=_CommandCompleter(commands),
            # Rows for suggestions are reserved only while suggestions are possible.
            complete_while_typing=Condition(self._suggests),
            enable_suspend=True,
            key_bindings=_keys(self._pastes),
            enable_open_in_editor=True,
            bottom_toolbar=lambda: ANSI(f"\x1b[0m{bar()}"),
        )

    def read(self, draft: str = "") -> str:
        rows = max(min(7, self._rows - 4), 0)
        text = self._session.prompt(default=self._pastes.fold(draft), reserve_space_for_menu=rows)
        return unquoted(self._pastes.unfold(text))

    def _suggests(self) -> bool:
        text = self._session.default_buffer.text
        return (text.startswith("/") or " @" in f" {text}") and self._rows >= _ROWS_FOR_MENU

    @property
    def _rows(self) -> int:
        """Return the terminal's rows as counted by the line editor; LINES may be another terminal's."""
        return self._session.output.get_size().rows


def unquoted(text: str) -> str:
    stripped = text.strip()
    if len(stripped) >= 2 * len(QUOTES) and stripped.startswith(QUOTES) and stripped.endswith(QUOTES):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def _private_history(path: Path, pastes: Pastes) -> History:
    """Return the history in a file readable by its owner only, or in memory if the file is not writable."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return UnfoldedHistory(pastes)
    return UnfoldedFileHistory(str(path), pastes)


def _keys(pastes: Pastes) -> KeyBindings:
    """Return key bindings: fold long pastes; Enter and Ctrl-C belong to a running history search (Ctrl-R)."""
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
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

    @keys.add("c-c", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add(Keys.BracketedPaste, filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(pastes.fold(event.data.replace("\r\n", "\n").replace("\r", "\n")))

    @keys.add("backspace", filter=Condition(lambda: bool(_mark_before_cursor(pastes))))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.delete_before_cursor(len(_mark_before_cursor(pastes)))

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _mark_before_cursor(pastes: Pastes) -> str:
    return pastes.mark_before(get_app().current_buffer.document.text_before_cursor)


class _CommandCompleter(Completer):
    """Completes commands and their arguments: files after /save, /load, /export, /image and @, settings after /set, models after /model,
    and numbers of conversations after /history and /delete."""

    def __init__(self, commands: Iterable[str]) -> None:
        self._commands = sorted(commands)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, argument = text.partition(" ")
        if space and name in ("/save", "/save!", "/load", "/export", "/image"):
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif space and (choices := CHOICES.get(name)) is not None and not argument.startswith("@"):
            yield from choices(argument)
            if name == "/model":
                yield from self._paths.get_completions(Document(argument), complete_event)
        elif (word := text.rpartition(" ")[2]).startswith("@"):
            yield from self._paths.get_completions(Document(word[1:]), complete_event)
        elif text.startswith("/") and not space:
            yield from _beginning_with(text, self._commands)


def _models(text: str) -> Iterator[Completion]:
    from ...loading.find.resolve import ALIASES, names_here

    return _beginning_with(text, (name for name in names_here() if name not in ALIASES or ALIASES[name].installed()))


def _conversations(text: str) -> Iterator[Completion]:
    for line in Archive().lines():
        number, _, about = line.strip().partition("  ")
        if number.isdigit() and number.startswith(text):
            yield Completion(number, start_position=-len(text), display_meta=about)


CHOICES: dict[str, Callable[[str], Iterator[Completion]]] = {
    "/set": lambda text: _beginning_with(text, (*SETTABLE, "stats")),
    "/model": _models,
    "/history": _conversations,
    "/delete": _conversations,
    "/show": lambda text: _beginning_with(text, ("last",)),
    "/thinking": lambda text: _beginning_with(text, ("folded", "full")),
    "/system": lambda text: _beginning_with(text, ("none",)),
}
"""Completions of arguments by command."""


def _beginning_with(text: str, names: Iterable[str]) -> Iterator[Completion]:
    return (Completion(name, start_position=-len(text)) for name in names if name.startswith(text))
