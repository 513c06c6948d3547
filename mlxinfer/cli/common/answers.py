"""Outputs to which `mlxinfer run` writes an answer as it arrives."""

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
    """Text that is wrapped between words as it comes. Lines of code blocks stay as they are."""

    def __init__(self, width: Callable[[], int]) -> None:
        """`width` is asked for the columns of the terminal, which may change."""
        self._width = width
        self._column = 0
        self._spaces = ""
        """Spaces after the last word, which are dropped where a line is wrapped."""
        self._word = ""
        """A word that may go on."""
        self._line = ""
        """The line so far."""
        self._code = False

    def feed(self, text: str) -> str:
        """Text that can be shown now."""
        return "".join(map(self._character, text))

    def close(self) -> str:
        """The rest."""
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
        if cell_len(character) > 1:  # of a script without spaces
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
    """Text goes to standard output, wrapped if that is a terminal. On a terminal, standard error shows the reasoning, dim, and what is
    going on before there is any text."""

    def __init__(self, progress: Progress, *, quiet: bool = False) -> None:
        """`quiet` shows only the answer."""
        self._progress = progress
        self._tty = sys.stdout.isatty()
        self._words = WordStream(lambda: shutil.get_terminal_size().columns)
        self._shows = sys.stderr.isatty() and not quiet
        self._line = StatusLine(sys.stderr) if self._shows and not dumb_terminal() else None
        self._thinks = False
        self._ends_line = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The line of what is going on, until there is text or the block ends."""
        if self._line is None:
            yield
            return
        self._line.begin(self._progress.note)
        try:
            yield
        finally:
            self._line.end()

    def show(self, chunk: Chunk) -> None:
        """The next piece of the answer."""
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
        """The rest, and a line break if there is none."""
        click.echo(self._words.close() if self._tty else "", nl=not self._ends_line)
