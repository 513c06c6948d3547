"""`python -m benchmarks serving`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..batch.workloads import MLX_SERVER, Plan
from ..common import options, study
from ..common.process import Process
from ..common.report import caption
from ..common.system import describe
from .workloads import ENGINES, WORKS


@click.command()
@options.name("serving")
@options.models("smollm2")
@options.rounds(7)
@click.option("--engines", default=",".join(ENGINES), show_default=True, help="Only these, separated by commas.")
@click.option("--steps", type=click.IntRange(2, 1024), default=64, show_default=True, help="Tokens of each stream; short requests.")
@click.option("--slow-steps", type=click.IntRange(2, 1024), default=8, show_default=True, help="Of mlx-lm's server.")
@options.llama_server
@options.threads
@options.cpus
def serving(
    name: str, models: dict[str, Path], cpus: list[int], threads: int | None, engines: str, rounds: int, steps: int, slow_steps: int
) -> None:
    """The server's cost per step, the time to a first byte, short requests. Writes results/serving/NAME.csv, .json, .md and .svg."""
    from ..batch.study import BatchStudy, Settings

    plan = Plan(prompt=250, steps=steps, streams=(1, 8), turns=1)
    names = options.split_words(engines, ENGINES, "--engines")
    settings = Settings(rounds, threads or len(cpus), plan, WORKS, names, {MLX_SERVER: slow_steps * 32})
    about = describe() | {"study": "serving", "cpus": cpus, "threads": settings.threads, "steps": steps}
    path = options.result_path("serving", name)
    study.measure(path, models, partial(BatchStudy, settings=settings, tell=options.tell, process=_start), about)
    show(path, about)


def _start(engine: str, threads: int) -> Process:
    return Process(engine, threads, command=[sys.executable, "-m", "benchmarks.serving.worker", engine])


def show(path: Path, about: dict[str, Any]) -> None:
    """Show stored results."""
    from .report import document

    models = study.stored_results(path, about)

    def draw(file: Path) -> None:
        from .picture import draw

        draw(models[0], file, caption(about))

    study.publish(path, document(models, about), draw)
