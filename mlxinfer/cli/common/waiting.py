"""Status line of a terminal before the first text, which erases it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

from ..remote.remote_model import RemoteModel

if TYPE_CHECKING:
    from ...engine.llm import LLM

NOTE_S = 0.25
"""Seconds between two updates."""


class StatusLine:
    """Status line, shown while the cursor is at the start of a line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Create a line on `stream`, by default standard output."""
        self._stream = stream
        self._note: Callable[[], str] = str
        self._shown = ""
        """Note on the screen."""
        self._fresh = True
        """True if the cursor is at the start of a line."""
        self._lock = Lock()
        self._ended = Event()

    def begin(self, note: Callable[[], str]) -> None:
        """Show `note()` periodically until `end`."""
        self._note, self._fresh, self._ended = note, True, Event()
        self.show()
        Thread(target=self._follow, args=(self._ended,), daemon=True).start()

    def write(self, text: str) -> None:
        """Write text to standard output in place of the line."""
        if text:
            with self._lock:
                self._erase()
                self._fresh = text.endswith("\n")
                _write(sys.stdout, text)

    def stop(self) -> None:
        """Stop updates; the note stays until the next text or `end`."""
        self._ended.set()

    def end(self) -> None:
        self.stop()
        with self._lock:
            self._erase()

    def _follow(self, ended: Event) -> None:
        with suppress(OSError, ValueError):  # the terminal has closed; the main thread reports it
            while not ended.wait(NOTE_S):
                self.show()

    def show(self) -> None:
        """Update the note."""
        with self._lock:
            if self._fresh and not self._ended.is_set():
                note = self._note()
                if note != self._shown:
                    self._shown = note
                    _write(self._stream or sys.stdout, f"\r\x1b[K\x1b[2m{note}\x1b[0m")

    def _erase(self) -> None:
        if self._shown:
            self._shown = ""
            _write(self._stream or sys.stdout, "\r\x1b[K")


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def reading(llm: LLM | RemoteModel) -> tuple[int, int] | None:
    """Return (tokens read, total tokens) of the prompt during prefill; otherwise None. A server does not report the first number: 0."""
    if isinstance(llm, RemoteModel):
        return llm.reading()
    for sequence in llm.engine.scheduler.running:
        if sequence.num_computed_tokens < len(sequence.prompt):
            return sequence.num_computed_tokens, len(sequence.prompt)
    return None


class Progress:
    """Progress of a request before its first text."""

    def __init__(self, reads: Callable[[], tuple[int, int] | None]) -> None:
        """Create the progress; `reads` is `reading` of a model."""
        self._reads = reads
        self.writing = False
        self._first: tuple[float, int] | None = None
        """First observation of the prompt: (seconds of `perf_counter`, tokens read)."""

    def note(self) -> str:
        if self.writing:
            return "writing…"
        tokens = self._reads()
        if tokens is None:
            return "reading…"
        done, count = tokens
        now = perf_counter()
        self._first = self._first or (now, done)
        since, before = self._first
        if done <= before:
            return f"reading {count:,} tokens…"
        return f"reading {count:,} tokens, {(count - done) * (now - since) / (done - before):.0f} s left"
