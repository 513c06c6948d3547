"""Messages, numbers and progress bars of commands on standard error, and loading of a model."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ...errors import PromptError
from ...types import EngineStats, TokenLogprob, Usage
from ...util.environment import VARIABLES
from .interrupts import interrupts_end

if TYPE_CHECKING:
    from ...engine.llm import LLM

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""
LOOPED = "the answer repeated the same text five times"


def dumb_terminal() -> bool:
    """Return True for a terminal without escape sequences: Emacs' shell, build logs."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def colours() -> bool:
    """Return True if colours are allowed (no-color.org). Bold, dim and underlined text does not count."""
    return not os.environ.get("NO_COLOR")


def tell(text: str, *, problem: bool = False) -> None:
    """Print a message on standard error, dim or, for a problem, red. Lines are wrapped on a terminal."""
    text = fitted(text, sys.stderr)
    style = {"fg": "red"} if problem and colours() else {"bold": True} if problem else {"dim": True}
    click.secho(text, err=True, color=False if dumb_terminal() else None, **style)


def fitted(text: str, stream: TextIO) -> str:
    """Return the text, wrapped between words for a terminal."""
    return wrapped(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def wrapped(text: str, width: int) -> str:
    """Wrap each line between words; lines of a two-column table continue under the second column."""
    return "\n".join(_wrapped_line(line, max(width, 20)) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    columns = re.match(r" *\S+(?: \S+)* {2,}(?=\S)", line)
    indent = columns.end() if columns and columns.end() < width // 2 else len(line) - len(line.lstrip()) + 2 * bool(columns)
    lines = textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True)
    return "\n".join(lines) if len(line) > width else line


def nearest(typed: str, names: Iterable[str]) -> str | None:
    """Return the nearest name; None without a near one."""
    by_lower = {name.lower(): name for name in names}
    typed = typed.lower()
    near = [name for name in by_lower if len(typed) > 2 and name.startswith(typed)] or get_close_matches(typed, by_lower, 1, 0.6)
    return by_lower[near[0]] if near else None


def did_you_mean(typed: str, names: Iterable[str]) -> str:
    """Return " (did you mean NAME?)", or "" without a near name."""
    near = nearest(typed, names)
    return f" (did you mean {near}?)" if near else ""


_MOST_BYTES = 2_000_000
"""Maximum bytes of a text file; more would not fit in a context."""


def tell_wrong_environment() -> None:
    """Say which MLXINFER_ variables have a value that means nothing and is ignored."""
    for variable in VARIABLES:
        value = os.environ.get(variable.name, "").strip()
        if value and variable.is_valid is not None and not variable.is_valid(value):
            tell(f"note: {variable.name}={value!r} is ignored: it takes {variable.takes}")
    threads, processors = os.environ.get("MLXINFER_THREADS", "").strip(), os.cpu_count() or 1
    if threads.isascii() and threads.isdigit() and processors < int(threads[:9]) <= 256:
        tell(f"note: MLXINFER_THREADS={threads}, but there are {processors} processors: more threads than that are slower")


def human_bytes(count: float) -> str:
    """Return "4.2 MB" for 4_200_000: decimal units, as on a Mac."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def printable(text: str) -> str:
    """Return the text without control characters, so that a model cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def as_text(data: bytes, what: str) -> str:
    """Decode UTF-8. Raises `PromptError` that names `what` if the bytes are not UTF-8."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise PromptError(f"{what} is UTF-16: convert it with iconv -f UTF-16 -t UTF-8")
    if b"\0" in data:
        raise PromptError(f"{what} is not text: it has zero bytes")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not UTF-8 text: byte {error.start + 1} is 0x{data[error.start]:02x}") from None


def text_of_file(path: Path) -> str:
    """Return a file's text. Raises `PromptError` for a file that is unreadable, too large or not text."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise PromptError(f"{path} is too large for a message: {human_bytes(path.stat().st_size)}")
        return as_text(path.read_bytes(), str(path))
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}") from error


def usage_line(usage: Usage) -> str:
    """Return a line with all figures of an answer's speed."""
    cached = f" ({usage.stats.reused_tokens} cached)" if usage.stats.reused_tokens else ""
    parts = [f"read {_tokens(usage.prompt_tokens)}{cached}", f"wrote {_tokens(usage.completion_tokens)}"]
    parts.append(f"first token after {usage.ttft_s:.2f} s")
    if usage.prefill_tps:
        parts.append(f"prefill {usage.prefill_tps:.1f} tok/s")
    if usage.decode_tps:
        parts.append(f"decode {usage.decode_tps:.1f} tok/s")
    if usage.stats.images:
        parts.append(_images(usage))
    if usage.stats.drafted_tokens:
        parts.append(f"{usage.stats.accepted_tokens} of {usage.stats.drafted_tokens} drafted tokens accepted")
    if usage.peak_memory_bytes:
        parts.append(f"peak {human_bytes(usage.peak_memory_bytes)}")
    return " · ".join(parts)


def experts_line(stats: EngineStats) -> str:
    """Return a line about experts that were read from the disk; "" if all are in memory."""
    if not stats.experts:
        return ""
    tokens = max(stats.computed_tokens, 1)
    return (
        f"experts: {stats.expert_slots} of {stats.experts} in memory, {stats.expert_hit_rate:.0%} of chosen ones · "
        f"{human_bytes(stats.expert_bytes_read)} read, {human_bytes(stats.expert_bytes_read / tokens)} a token · "
        f"waited {stats.expert_wait_s:.2f} s, {1000 * stats.expert_wait_s / tokens:.1f} ms a token"
    )


def _images(usage: Usage) -> str:
    stats = usage.stats
    cached = f", {stats.images_cached} of them cached" if stats.images_cached else f", encoded in {stats.image_encode_s:.2f} s"
    return f"{stats.images} image{'' if stats.images == 1 else 's'} of {_tokens(stats.image_tokens)}{cached}"


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def short_usage_line(usage: Usage) -> str:
    """Return a short line for each answer of a chat."""
    speed = f" · {usage.decode_tps:.1f} tok/s" if usage.decode_tps else ""
    return f"{_tokens(usage.completion_tokens)}{speed} · first after {usage.ttft_s:.2f} s"


def logprob_table(logprobs: Sequence[TokenLogprob]) -> str:
    """Return one line per token: its log-probability and the likeliest alternatives."""
    lines = []
    for token in logprobs:
        others = "  ".join(f"{text!r} {logprob:.2f}" for _, text, logprob in token.top)
        lines.append(f"{token.text!r:<16} {token.logprob:7.3f}   {others}".rstrip())
    return "\n".join(lines)


@contextmanager
def compiling_told() -> Iterator[None]:
    """Within the context, tell a user once that a start takes longer because Metal compiles kernels and they are tried."""
    from ...kernels_metal.kernel_trial import slow_trials_told

    with slow_trials_told(lambda: tell("compiling kernels (once)")):
        yield


@contextmanager
def byte_bar(title: str) -> Iterator[Progress | None]:
    """Yield a progress callback of a temporary bar; None if standard error is not a terminal."""
    if not sys.stderr.isatty() or dumb_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("[dim]{task.description}"), BarColumn(30), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, compiling_told():
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def tell_download(model: str) -> None:
    """Print size and place of a model of the catalogue that is fetched now."""
    from ...loading.find.resolve import not_fetched

    if known := not_fetched(model):
        from ...loading.find.hub import is_offline

        if not is_offline():
            tell(f"fetching {known.name}: {human_bytes(known.nbytes)} from {known.repo} on the hub")


@contextmanager
def opened(model: str, options: dict[str, Any], *, quiet: bool = False) -> Iterator[LLM]:
    """Open an `LLM` for the block; `quiet` hides bar and notes. Raises `MLXInferError`."""
    with interrupts_end():
        from ... import LLM

    if not quiet:
        tell_download(model)
    with nullcontext() if quiet else byte_bar(f"loading {model}") as progress:
        llm = LLM(model, progress=progress, **options)
    try:
        for note in () if quiet else llm.notes:
            tell(f"note: {note}")
        yield llm
    finally:
        llm.close()
