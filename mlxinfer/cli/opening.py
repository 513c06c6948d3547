"""Load a model for a command: a bar on standard error while it takes time, and what the user should know about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..engine.llm import LLM

Progress = Callable[[int, int], None]


@contextmanager
def byte_bar(title: str, then: str | None = None) -> Iterator[Progress | None]:
    """A bar that is told (bytes done, bytes in all), removed at the end; None where standard error is no terminal.

    `then` is its title when all bytes are done and something else is going on."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("[dim]{task.description}"), BarColumn(30), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, description=then if then and done >= total else title)


@contextmanager
def opened(model: str, options: dict[str, Any]) -> Iterator[LLM]:
    """An `LLM`, closed at the end. Raises `MLXInferError`."""
    from ..engine.llm import LLM

    with byte_bar(f"loading {model}") as progress:
        llm = LLM(model, progress=progress, **options)
    try:
        for note in llm.notes:
            click.secho(f"note: {note}", err=True, dim=True)
        yield llm
    finally:
        llm.close()
