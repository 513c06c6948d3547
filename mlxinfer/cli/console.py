"""Load a model for a command: a bar on standard error while it takes time, and what the user should know about it."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..types import TokenLogprob, Usage

if TYPE_CHECKING:
    from ..engine.llm import LLM


def human_bytes(count: float) -> str:
    """4_200_000 -> "4.2 MB": decimal units, as file managers on a Mac show them."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def printable(text: str) -> str:
    """The text without control characters: what a model writes must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def usage_line(usage: Usage) -> str:
    parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens", f"ttft {usage.ttft_s:.2f} s"]
    if usage.stats.reused_tokens:
        parts.append(f"{usage.stats.reused_tokens} of {usage.prompt_tokens} prompt tokens reused")
    if usage.prefill_tps:
        parts.append(f"prefill {usage.prefill_tps:.1f} tok/s")
    if usage.decode_tps:
        parts.append(f"decode {usage.decode_tps:.1f} tok/s")
    if usage.stats.drafted_tokens:
        parts.append(f"{usage.stats.accepted_tokens} of {usage.stats.drafted_tokens} drafts right")
    if usage.peak_memory_bytes:
        parts.append(f"peak {human_bytes(usage.peak_memory_bytes)}")
    return " · ".join(parts)


def logprob_table(logprobs: Sequence[TokenLogprob]) -> str:
    """One line a token: its log-probability, and the likeliest alternatives."""
    lines = []
    for token in logprobs:
        others = "  ".join(f"{text!r} {logprob:.2f}" for _, text, logprob in token.top)
        lines.append(f"{token.text!r:<16} {token.logprob:7.3f}   {others}".rstrip())
    return "\n".join(lines)


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
