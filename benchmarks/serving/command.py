"""`python -m benchmarks serving`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..files import measure, place, publish
from ..options import cpus_option, models_option, stem
from ..process import Process, WorkerError
from ..samples import Results, read
from ..system import describe
from .workloads import EVERYBODY, WORKS

STUDY = "serving"


@click.command()
@click.option("--name", default="serving", show_default=True, help="Of the files in results/.")
@models_option("smollm2")
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True)
@click.option("--engines", default=",".join(EVERYBODY), show_default=True, help="Only these; several with commas.")
@click.option("--steps", type=click.IntRange(2, 1024), default=64, show_default=True, help="Tokens of each stream; short requests.")
@click.option("--slow-steps", type=click.IntRange(2, 1024), default=8, show_default=True, help="Of mlx-lm's server.")
@click.option(
    "--llama-server",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The program.  [default: $LLAMA_SERVER, or on the PATH]",
)
@click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
@cpus_option
def serving(name: str, models: dict[str, Path], cpus: list[int], threads: int | None, llama_server: Path | None, **options: Any) -> None:
    """What the server adds to a step, the time to a first byte, short requests. Writes results/NAME.csv, .json, .md and .svg."""
    from ..batch.servers import PATH_VARIABLE
    from ..batch.study import Settings, Study
    from ..batch.workloads import MLX_SERVER, Plan

    if llama_server:
        os.environ[PATH_VARIABLE] = str(llama_server.absolute())
    names = tuple(word for word in options["engines"].split(",") if word)
    if unknown := [word for word in names if word not in EVERYBODY]:
        raise click.UsageError(f"--engines: {unknown[0]!r} is not one of {', '.join(EVERYBODY)}")
    plan = Plan(prompt=250, steps=options["steps"], streams=(1, 8), turns=1)
    limits = {MLX_SERVER: options["slow_steps"] * 32}
    settings = Settings(options["rounds"], threads or len(cpus), plan, WORKS, names, limits)
    about = describe() | {"study": STUDY, "cpus": cpus, "threads": settings.threads, "steps": plan.steps}
    make = partial(Study, settings=settings, tell=lambda text: click.echo(text, err=True), process=_start)
    try:
        measure(stem("serving", name), models, make, about)
    except WorkerError as error:
        raise click.ClickException(str(error)) from error
    show(stem("serving", name), about)


def _start(engine: str, threads: int) -> Process:
    return Process(engine, threads, command=[sys.executable, "-m", "benchmarks.serving.worker", engine])


def show(path: Path, about: dict[str, Any]) -> None:
    """The table and the picture of stored results."""
    from .report import caption, document

    samples = read(place(path, "csv"))
    models = [Results(name, samples) for name in about["models"]]

    def picture(file: Path) -> None:
        from .picture import draw

        draw(models[0], file, caption(about))

    publish(path, document(models, about), picture)
