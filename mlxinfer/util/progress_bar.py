"""A bar of complete answers on standard error, or in a notebook's cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answers_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows the number of complete answers of `total`. Without a terminal nothing is drawn."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("answers"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda done: bar.update(task, completed=done)
        bar.update(task, completed=total)
