"""Progress line of a terminal before the first text; the text erases it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ...engine.llm import LLM

NOTE_S = 0.25
"""Seconds between two looks at what is going on."""


class StatusLine:
    """A line that says what is going on, as long as the cursor is at the beginning of a line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream` is where the line is shown; standard output where it is None."""
        self._stream = stream
        self._note: Callable[[], str] = str
        self._shown = ""
        """The note on the screen."""
        self._fresh = True
        """The cursor is at the beginning of a line, where a note may stand."""
        self._lock = Lock()
        self._ended = Event()

    def begin(self, note: Callable[[], str]) -> None:
        """Show what `note` says, from time to time, until `end`."""
        self._note, self._fresh, self._ended = note, True, Event()
        self.show()
        Thread(target=self._follow, args=(self._ended,), daemon=True).start()

    def write(self, text: str) -> None:
        """Text for standard output, in the place of the line."""
        if text:
            with self._lock:
                self._erase()
                self._fresh = text.endswith("\n")
                _write(sys.stdout, text)

    def stop(self) -> None:
        """Nothing further is shown; what is on the screen stays until the next text, or `end`."""
        self._ended.set()

    def end(self) -> None:
        self.stop()
        with self._lock:
            self._erase()

    def _follow(self, ended: Event) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, which the main thread will find out
            while not ended.wait(NOTE_S):
                self.show()

    def show(self) -> None:
        """Look at what is going on, and show it."""
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


def reading(llm: LLM) -> tuple[int, int] | None:
    """(tokens read, tokens in all) of the prompt that the engine is reading; None when it is not reading one."""
    for sequence in llm.engine.scheduler.running:
        if sequence.num_computed_tokens < len(sequence.prompt):
            return sequence.num_computed_tokens, len(sequence.prompt)
    return None


class Progress:
    """Progress of a request before its first text."""

    def __init__(self, reads: Callable[[], tuple[int, int] | None]) -> None:
        """`reads` is `reading` of a model."""
        self._reads = reads
        self.writing = False
        self._first: tuple[float, int] | None = None
        """First look at the prompt: seconds of `perf_counter`, and tokens that had been read."""

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
