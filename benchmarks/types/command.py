"""`python -m benchmarks types`: decode and prefill speed in every GGUF block type, compared with llama.cpp."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from ..compare import Comparison, Settings
from ..files import measure, place
from ..options import RESULTS, cpus_option, engines_option
from ..process import WorkerError
from ..report import caption, versions
from ..samples import Results, read
from ..system import describe
from ..workloads import works
from .models import models
from .random_model import write
from .report import PREFILL, table

STUDY = "types"
_DECODE = "decode at 0"


@click.command()
@click.option("--name", default="types", show_default=True, help="Of the files in results/.")
@click.option("--models", "chosen", default="", help="Only those whose names contain one of these; several with commas.  [default: all]")
@engines_option("mlxinfer,llama.cpp")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(1, 192), default=32, show_default=True, help="Tokens of a sample of decoding.")
@click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
@cpus_option
def types(name: str, chosen: str, engines: tuple[str, ...], rounds: int, steps: int, threads: int | None, cpus: list[int]) -> None:
    """Random models, one per block type. Writes results/NAME.csv, .json and .md."""
    parts = chosen.split(",")
    found = {model: about for model, about in models().items() if any(part in model for part in parts)}
    kinds = tuple(work for work in works(steps) if work.name in (_DECODE, PREFILL))
    settings = Settings(engines=engines, works=kinds, rounds=rounds, threads=threads or len(cpus), start=False)
    about = describe() | {"study": STUDY, "cpus": cpus, "threads": settings.threads, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        paths = {model: Path(folder) / f"{model.replace(' ', '-')}.gguf" for model in found}

        def start(model: str, path: Path) -> Comparison:
            for other in paths.values():
                other.unlink(missing_ok=True)
            write(path, found[model].sizes, found[model].type_of)
            return Comparison(model, path, settings, tell=lambda text: click.echo(text, err=True))

        try:
            measure(RESULTS / name, paths, start, about)
        except WorkerError as error:
            raise click.ClickException(str(error)) from error
    show(RESULTS / name, about)


def show(stem: Path, about: dict[str, Any] | None = None) -> None:
    """Print the table of stored results, and write it again."""
    about = about or json.loads(place(stem, "json").read_text(encoding="utf-8"))
    samples = read(place(stem, "csv"))
    found = [Results(name, samples) for name in about["models"]]
    text = f"{caption(about)}\n\n{versions(about)}\n\n{table(found, _DECODE)}\n"
    place(stem, "md").write_text(text, encoding="utf-8")
    click.echo(text)
