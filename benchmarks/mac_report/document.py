"""The file of the report: a table of all steps, then what each one printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .running import ROOT, Outcome

TITLE = "# mlxinfer on a Mac\n"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours, cursor movements and other control characters of a terminal, except tab and line feed."""
_LEAST_FENCE = 3


def document(outcomes: Sequence[Outcome]) -> str:
    """Return the report in Markdown, without names of the user and the machine, home directories and keys."""
    from mlxinfer.util.private_text import without_private

    rows = ["| step | result | seconds | last line |", "| --- | --- | ---: | --- |"]
    rows += [f"| {o.step.title} | {o.status} | {o.seconds:.1f} | {_cell(o.result)} |" for o in outcomes]
    parts = [TITLE, "\n".join(rows) + "\n", *(_section(o) for o in outcomes)]
    return without_private("\n".join(parts).replace(str(ROOT), "."))


def _cell(text: str) -> str:
    """Return a line that cannot end a cell of a table."""
    return _clean(text).replace("|", "/")


def _section(outcome: Outcome) -> str:
    text = _clean(outcome.output).strip("\n")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, _LEAST_FENCE)
    body = f"\n{fence}\n{text}\n{fence}\n" if text else ""
    return f"## {outcome.step.title}\n\n`{outcome.step.shown()}`: {outcome.status}, {outcome.seconds:.1f} s\n{body}"


def _clean(text: str) -> str:
    """Return the text as a terminal would show it in the end: of a line that was written over, the last version."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))
    return _CONTROL.sub("", "\n".join(lines))


def write(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Replace the file with the report so far. Raises OSError."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(document(outcomes), encoding="utf-8")
    new.replace(file)
