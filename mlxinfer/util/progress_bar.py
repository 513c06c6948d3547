"""A bar of complete answers on standard error, or in a notebook's cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answers_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows the number of complete answers of `total`; None unless `shown`. Without a terminal nothing is drawn."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("answers"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda done: bar.update(task, completed=done)
        bar.update(task, completed=total)
