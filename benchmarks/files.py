"""Where results are stored, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import click

from .samples import Sample, Writer


class Run(Protocol):
    """Measures one model. `about` and `left_out` are complete once the first sample exists."""

    about: dict[str, Any]
    left_out: dict[str, str]

    def run(self) -> Iterator[Sample]: ...


def place(stem: Path, kind: str) -> Path:
    return stem.with_name(f"{stem.name}.{kind}")


def publish(stem: Path, text: str, picture: Callable[[Path], None]) -> None:
    """Write and print the tables of stored results. `picture` draws into a file, where matplotlib is installed."""
    place(stem, "md").write_text(text, encoding="utf-8")
    click.echo(text)
    try:
        picture(place(stem, "svg"))
    except ImportError:
        click.echo("There is no picture without matplotlib: pip install '.[bench]'", err=True)


def measure(stem: Path, models: dict[str, Path], make: Callable[[str, Path], Run], about: dict[str, Any]) -> None:
    """Run and store the samples. Raises what the run raises; samples taken until then are kept."""
    about["models"] = {}
    stem.parent.mkdir(exist_ok=True)
    with place(stem, "csv").open("w", encoding="utf-8", newline="") as file:
        writer = Writer(file)
        for name, path in models.items():
            run = make(name, path)
            about["models"][name] = {"file": path.name, "engines": run.about, "left_out": run.left_out}
            try:
                for sample in run.run():
                    writer.add(sample)
            finally:
                place(stem, "json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
