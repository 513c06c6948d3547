"""The stages of a long command on standard error: one bar on a terminal, and a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...util.words import counted
from .console import dumb_terminal, human_bytes, tell

FIRST_S, EVERY_S = 10.0, 30.0
"""Seconds without a terminal until the first line, and between two lines."""


class Stages:
    """Is told how far each stage has come, and shows one of them at a time. Without a terminal, `now` says when the next line is due."""

    def __init__(self, bar: Any = None, now: Callable[[], float] = time.monotonic) -> None:
        """`bar` is a `rich` display that is shown from the first stage on; None writes lines."""
        self._bar, self._now = bar, now
        self._task: Any = None
        self._stage = ""
        self._begun, self._first, self._due = 0.0, 0, now() + FIRST_S

    def tell(self, stage: str, done: int, total: int, unit: str = "positions") -> None:
        """Show `done` of `total`, which are bytes or whatever `unit` says."""
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
        """`tell` for one stage."""
        return lambda done, total: self.tell(stage, done, total, unit)

    def _begin_bar(self, stage: str, total: int, count: str) -> None:
        if self._task is None:
            self._task = self._bar.add_task(stage, total=total, count=count)
            self._bar.start()
        else:  # another stage has another speed: the time that is left is computed anew
            self._bar.reset(self._task, total=total, description=stage, count=count)

    def _left(self, done: int, total: int) -> str:
        """The time that is left at the speed of this stage so far; nothing before a second piece is done."""
        if done <= self._first:
            return ""
        return f", {human_time((self._now() - self._begun) / (done - self._first) * (total - done))} left"


@contextmanager
def stages() -> Iterator[Stages]:
    """`Stages` whose bar is removed at the end. Nothing is shown before the first stage, so that messages may come first."""
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
        yield Stages(bar)
    finally:
        bar.stop()


def human_time(seconds: float) -> str:
    """100 -> "about 2 minutes"."""
    if seconds < 90:
        return f"about {counted(max(round(seconds), 1), 'second')}"
    if seconds < 90 * 60:
        return f"about {counted(round(seconds / 60), 'minute')}"
    return f"about {seconds / 3600:.1f} hours"


def _count(done: int, total: int, unit: str) -> str:
    return f"{human_bytes(done)} of {human_bytes(total)}" if unit == "bytes" else f"{done:,} of {total:,} {unit}"
