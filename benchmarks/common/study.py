"""Runs a study, and stores and shows its results."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from .process import Process, WorkerError, convert_for_mlx_lm
from .samples import Results, Sample, Writer, read

Tell = Callable[[str], None]


class Study:
    """Measures one model with several engines, alternating, so other load on the machine affects all of them alike.

    `about` and `left_out` are filled when engines start. `settings` has the `engines`, `works`, `rounds`, `threads` of each engine, and
    `limits`, the longest prompts in tokens of slow engines, which results state.
    """

    def __init__(self, name: str, path: Path, settings: Any, tell: Tell, process: Callable[[str, int], Process]) -> None:
        self.name, self.path, self.settings = name, path, settings
        self.about: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self._tell, self._process = tell, process
        self._workers: dict[str, Process] = {}
        self._converted = ""

    def run(self) -> Iterator[Sample]:
        """Run all rounds. Raises `WorkerError` if no engine starts."""
        raise NotImplementedError

    def load(self, worker: Process, **settings: Any) -> dict[str, Any]:
        """Load the model in a worker. Returns the description of the engine."""
        raise NotImplementedError

    def start(self, engines: Iterable[str], stack: ExitStack) -> None:
        """Start the engines. One that does not start is left out. Raises `WorkerError` if none starts."""
        for engine in engines:
            try:
                if engine.startswith("mlx-lm") and not self._converted:
                    self._tell("converting for mlx-lm")
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    self._converted = str(convert_for_mlx_lm(self.path, folder / self.name))
                worker = stack.enter_context(self._process(engine, self.settings.threads))
                self.about[engine] = self.load(worker)
                self._workers[engine] = worker
            except WorkerError as error:
                self.leave_out(engine, str(error))
        if not self._workers:
            raise WorkerError("; ".join(self.left_out.values()))

    def leave_out(self, engine: str, reason: str) -> None:
        self.left_out[engine] = reason
        self._workers.pop(engine, None)
        self._tell(f"left out: {reason}")

    def model_of(self, engine: str) -> str:
        """Path of the model for an engine. All but mlx-lm read the file itself."""
        return self._converted if engine.startswith("mlx-lm") else str(self.path)

    def order(self, turn: int, engines: Iterable[str]) -> list[str]:
        """The engines that run, a different one first in each turn."""
        names = [engine for engine in self._workers if engine in engines]
        first = turn % len(names) if names else 0
        return names[first:] + names[:first]


def place(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}")


def measure(path: Path, models: dict[str, Path], make: Callable[[str, Path], Study], about: dict[str, Any]) -> None:
    """Run the study of each model and store the samples. Raises `click.ClickException` if a worker fails; earlier samples are stored."""
    about["models"] = {}
    path.parent.mkdir(exist_ok=True)
    with place(path, "csv").open("w", encoding="utf-8", newline="") as file:
        writer = Writer(file)
        for name, model in models.items():
            run = make(name, model)
            about["models"][name] = {"file": model.name, "engines": run.about, "left_out": run.left_out}
            try:
                for sample in run.run():
                    writer.add(sample)
            except WorkerError as error:
                raise click.ClickException(str(error)) from error
            finally:
                write_about(path, about)


def write_about(path: Path, about: dict[str, Any]) -> None:
    place(path, "json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_results(path: Path, about: dict[str, Any]) -> list[Results]:
    """The stored samples, by model."""
    samples = read(place(path, "csv"))
    return [Results(name, samples) for name in about["models"]]


def publish(path: Path, text: str, draw: Callable[[Path], None] | None = None) -> None:
    """Write and print the tables of results, and draw their picture, if any, where matplotlib is installed."""
    place(path, "md").write_text(text, encoding="utf-8")
    click.echo(text)
    if draw is None:
        return
    try:
        draw(place(path, "svg"))
    except ImportError:
        click.echo("The picture needs matplotlib: pip install '.[bench]'", err=True)
