"""Outputs of `mlxinfer run` for an arriving answer."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.cells import cell_len

from ...types import Chunk
from .console import dumb_terminal, printable
from .waiting import Progress, StatusLine

_FENCES = ("```", "~~~")


class WordStream:
    """Wraps arriving text between words, except inside code blocks."""

    def __init__(self, width: Callable[[], int]) -> None:
        """Create a stream; `width` returns the terminal's columns, which may change."""
        self._width = width
        self._column = 0
        self._spaces = ""
        """Spaces after the last word, dropped at a line break."""
        self._word = ""
        """Last word, which may continue."""
        self._line = ""
        self._code = False

    def feed(self, text: str) -> str:
        """Add text and return the part that can be shown."""
        return "".join(map(self._character, text))

    def close(self) -> str:
        """Return the rest."""
        rest = self._flush() + self._spaces
        self._spaces = ""
        return rest

    def _character(self, character: str) -> str:
        if character == "\n":
            out = self.close() + "\n"
            self._code ^= self._line.lstrip().startswith(_FENCES)
            self._column, self._line = 0, ""
            return out
        self._line += character
        if self._code:
            return character
        if character.isspace():
            out = self._flush()
            self._spaces += character
            return out
        if cell_len(character) > 1:  # a script without spaces
            out = self._flush()
            self._word = character
            return out + self._flush()
        self._word += character
        return ""

    def _flush(self) -> str:
        if not self._word:
            return ""
        spaces, word = self._spaces, self._word
        self._spaces = self._word = ""
        wide = cell_len(spaces) + cell_len(word)
        if self._column and self._column + wide > self._width():
            self._column = cell_len(word)
            return f"\n{word}"
        self._column += wide
        return spaces + word


class AnswerScreen:
    """Writes text to standard output, wrapped on a terminal. Standard error, if a terminal, shows dim reasoning and the progress."""

    def __init__(self, progress: Progress, *, quiet: bool = False) -> None:
        """Create a screen; with `quiet` it shows only the answer."""
        self._progress = progress
        self._tty = sys.stdout.isatty()
        self._words = WordStream(lambda: shutil.get_terminal_size().columns)
        self._shows = sys.stderr.isatty() and not quiet
        self._line = StatusLine(sys.stderr) if self._shows and not dumb_terminal() else None
        self._thinks = False
        self._ends_line = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show the progress until the first text or the end of the block."""
        if self._line is None:
            yield
            return
        self._line.begin(self._progress.note)
        try:
            yield
        finally:
            self._line.end()

    def show(self, chunk: Chunk) -> None:
        """Show the next chunk."""
        self._progress.writing = True
        if self._line is not None and (chunk.text or (chunk.reasoning and self._shows)):
            self._line.end()
        if chunk.reasoning and self._shows:
            click.secho(printable(chunk.reasoning), dim=True, nl=False, err=True)
            self._thinks = True
        if chunk.text and self._thinks:
            click.echo("\n", err=True)
            self._thinks = False
        if chunk.text:
            self._ends_line = chunk.text.endswith("\n")
            click.echo(self._words.feed(printable(chunk.text)) if self._tty else chunk.text, nl=False)

    def close(self) -> None:
        """Write the rest and a final line break."""
        click.echo(self._words.close() if self._tty else "", nl=not self._ends_line)
