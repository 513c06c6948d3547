"""Progress of a long command's stages on standard error: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...util.words import counted
from .console import compiling_told, dumb_terminal, human_bytes, tell

FIRST_S, EVERY_S = 10.0, 30.0
"""Seconds before the first line and between lines, without a terminal."""


class Stages:
    """Shows the progress of one stage at a time. Without a terminal, `now` is the clock for lines."""

    def __init__(self, bar: Any = None, now: Callable[[], float] = time.monotonic) -> None:
        """Create a display; `bar` is a `rich` display that starts with the first stage, None writes lines."""
        self._bar, self._now = bar, now
        self._task: Any = None
        self._stage = ""
        self._begun, self._first, self._due = 0.0, 0, now() + FIRST_S

    def tell(self, stage: str, done: int, total: int, unit: str = "positions") -> None:
        """Show `done` of `total`, in `unit`."""
        if stage != self._stage:
            self._stage, self._begun, self._first = stage, self._now(), done
            if self._bar is not None:
                self._begin_bar(stage, total, _count(done, total, unit))
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, count=_count(done, total, unit))
        elif self._now() >= self._due and done < total:
            self._due = self._now() + EVERY_S
            tell(f"{stage}: {_count(done, total, unit)}{self._left(done, total)}")

    def of(self, stage: str, unit: str = "bytes") -> Callable[[int, int], None]:
        """Return `tell` for one stage."""
        return lambda done, total: self.tell(stage, done, total, unit)

    def _begin_bar(self, stage: str, total: int, count: str) -> None:
        if self._task is None:
            self._task = self._bar.add_task(stage, total=total, count=count)
            self._bar.start()
        else:  # each stage has its own speed
            self._bar.reset(self._task, total=total, description=stage, count=count)

    def _left(self, done: int, total: int) -> str:
        """Return the remaining time at the stage's present speed, or "" before the second piece."""
        if done <= self._first:
            return ""
        return f", {human_time((self._now() - self._begun) / (done - self._first) * (total - done))} left"


@contextmanager
def stages() -> Iterator[Stages]:
    """Yield `Stages` with a temporary bar, which appears with the first stage so that messages may precede it."""
    if not sys.stderr.isatty() or dumb_terminal():
        yield Stages()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    title = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        TextColumn("[dim]{task.description}", table_column=title),
        BarColumn(20),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    try:
        with compiling_told():
            yield Stages(bar)
    finally:
        bar.stop()


def human_time(seconds: float) -> str:
    """Return "about 2 minutes" for 100."""
    if seconds < 90:
        return f"about {counted(max(round(seconds), 1), 'second')}"
    if seconds < 90 * 60:
        return f"about {counted(round(seconds / 60), 'minute')}"
    return f"about {seconds / 3600:.1f} hours"


def _count(done: int, total: int, unit: str) -> str:
    return f"{human_bytes(done)} of {human_bytes(total)}" if unit == "bytes" else f"{done:,} of {total:,} {unit}"
