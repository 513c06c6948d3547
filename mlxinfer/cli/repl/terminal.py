"""Where the user's messages come from (a line editor on a terminal, or the lines of a pipe), and where answers go."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from ...errors import PromptError
from ..console import as_text, colours, dumb_terminal, printable
from .conversation import SETTABLE, Conversation
from .markdown import MarkdownStream

_WIDEST = 100
"""Columns of an answer on a wider terminal."""
_NOTE_S = 0.25
"""Seconds between two looks at how far the prompt has been read."""
_ROWS_FOR_MENU = 10
"""Rows of a terminal that has room for suggestions below the line being typed."""


class Writer(Protocol):
    """Where answers go."""

    def begin(self, note: Callable[[], str]) -> None:
        """An answer follows; until then, `note` says what is going on."""
        ...

    def text(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None:
        """What the model thinks before it answers, which is no part of the answer."""
        ...

    def end(self) -> None: ...


class PlainWriter:
    """Writes answers as they are, each ended by a line break."""

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


class TerminalWriter:
    """Renders Markdown as it comes. While nothing can be shown yet, a line says what is going on."""

    def __init__(self) -> None:
        self._stream = MarkdownStream(80)
        self._note: Callable[[], str] = str
        self._shown = ""
        """The note on the screen."""
        self._thinking = ""
        """The last character of the reasoning; empty outside of it."""
        self._fresh = True
        """The cursor is at the beginning of a line, where a note may stand."""
        self._lock = Lock()
        self._ended = Event()

    def begin(self, note: Callable[[], str]) -> None:
        self._stream = MarkdownStream(min(shutil.get_terminal_size().columns, _WIDEST), colours=colours())
        self._note, self._fresh, self._ended = note, True, Event()
        self._show_note()
        Thread(target=self._follow, args=(self._ended,), daemon=True).start()

    def reasoning(self, text: str) -> None:
        if text:
            self._thinking = text[-1]
            self._emit(f"\x1b[2m{printable(text)}\x1b[0m")

    def text(self, text: str) -> None:
        if text and self._thinking:
            self._emit("\n" if self._thinking == "\n" else "\n\n")
            self._thinking = ""
        self._emit(self._stream.feed(printable(text)))

    def end(self) -> None:
        self._ended.set()
        if self._thinking and self._thinking != "\n":
            self._emit("\n")
        self._thinking = ""
        self._emit(self._stream.close())
        with self._lock:
            self._erase_note()

    def _follow(self, ended: Event) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, which the main thread will find out
            while not ended.wait(_NOTE_S):
                self._show_note()

    def _show_note(self) -> None:
        with self._lock:
            if self._fresh and not self._ended.is_set():
                rows = self._stream.table_rows
                note = f"writing a table, {rows} rows…" if rows else self._note()
                if note != self._shown:
                    self._shown = note
                    _write(f"\r\x1b[K\x1b[2m{note}\x1b[0m")

    def _emit(self, text: str) -> None:
        if text:
            with self._lock:
                self._erase_note()
                self._fresh = text.endswith("\n")
                _write(text)

    def _erase_note(self) -> None:
        if self._shown:
            self._shown = ""
            _write("\r\x1b[K")


def writer() -> Writer:
    """The writer that suits standard output."""
    if not sys.stdout.isatty():
        return PlainWriter()
    return PlainWriter(printable) if dumb_terminal() else TerminalWriter()


def meter(conversation: Conversation, cells: int = 12) -> str:
    """How full the context is: a bar, and numbers."""
    share = _share(conversation)
    filled = min(round(share * cells), cells)
    return f"{'█' * filled}{'░' * (cells - filled)} {_numbers(conversation)}"


def bar(conversation: Conversation, width: int) -> str:
    """The meter with the model's name as far as `width` columns have room for them, and with a warning colour when it gets full."""
    meters = [f" {conversation.name}  {meter(conversation)}", f" {meter(conversation)}", f" {_numbers(conversation)}"]
    shown = next((text for text in meters if len(text) <= width), f" {_share(conversation):.0%}")
    share = _share(conversation)
    return f"\x1b[31m{shown}\x1b[0m" if share >= 0.95 else f"\x1b[33m{shown}\x1b[0m" if share >= 0.8 else shown


def _share(conversation: Conversation) -> float:
    return conversation.context_used / conversation.context_size


def _numbers(conversation: Conversation) -> str:
    return f"{conversation.context_used} / {conversation.context_size} tokens ({_share(conversation):.0%})"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Keyboard:
    """The terminal's input while an answer is written: keys are not echoed into it, and are kept for the next prompt."""

    def __init__(self) -> None:
        self._usual: list[Any] | None = None
        with suppress(termios.error, OSError, ValueError):
            self._usual = termios.tcgetattr(sys.stdin.fileno())

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """Ends with the terminal as it was. After Ctrl-Z and `fg`, keys are hushed again."""
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
        """Keys as they were when the chat began."""
        if self._usual is not None:
            self._apply(self._usual)

    def _apply(self, attributes: list[Any]) -> None:
        # In the background it would stop the process.
        with suppress(termios.error, OSError, ValueError):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, attributes)


QUOTES = '"""'


class Reader(Protocol):
    """Where messages come from."""

    def read(self, draft: str = "") -> str:
        """The next message, from `draft` on where it can be edited. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C, and
        `PromptError` for what cannot be a message."""
        ...


class PipeReader:
    """A message a line; several lines between triple quotes. On a terminal that cannot edit lines, after a prompt."""

    def __init__(self, prompt: str = "") -> None:
        self._prompt = prompt
        self._number = 0

    def read(self, draft: str = "") -> str:
        if self._prompt:
            _write(self._prompt)
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
    """A line editor with history and completion, and a bar below that says how full the context is."""

    def __init__(self, commands: Iterable[str], bar: Callable[[], str], history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=ANSI("\x1b[1;32m>\x1b[0m "),
            multiline=True,
            prompt_continuation=ANSI("\x1b[2m·\x1b[0m "),
            history=_private_history(history),
            completer=_CommandCompleter(commands),
            # Rows for suggestions are reserved only while there may be some.
            complete_while_typing=Condition(self._suggests),
            enable_suspend=True,
            key_bindings=_keys(),
            bottom_toolbar=lambda: ANSI(f"\x1b[0m{bar()}"),
        )

    def read(self, draft: str = "") -> str:
        rows = max(min(7, self._rows - 4), 0)
        return unquoted(self._session.prompt(default=draft, reserve_space_for_menu=rows))

    def _suggests(self) -> bool:
        text = self._session.default_buffer.text
        return (text.startswith("/") or " @" in f" {text}") and self._rows >= _ROWS_FOR_MENU

    @property
    def _rows(self) -> int:
        """Rows of the terminal as the line editor counts them: LINES may be that of another terminal, from which this one was opened."""
        return self._session.output.get_size().rows


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
    """Completes commands, names of files after /save, /load and @, and names of settings after /set."""

    def __init__(self, commands: Iterable[str]) -> None:
        self._commands = sorted(commands)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, argument = text.partition(" ")
        if space and name in ("/save", "/save!", "/load"):
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif space and name == "/set":
            yield from _beginning_with(argument, (*SETTABLE, "stats"))
        elif (word := text.rpartition(" ")[2]).startswith("@"):
            yield from self._paths.get_completions(Document(word[1:]), complete_event)
        elif text.startswith("/") and not space:
            yield from _beginning_with(text, self._commands)


def _beginning_with(text: str, names: Iterable[str]) -> Iterator[Completion]:
    return (Completion(name, start_position=-len(text)) for name in names if name.startswith(text))
