"""`python -m benchmarks families`: decoding with experts and with recurrence, next to llama.cpp and mlx-lm."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click

from ..options import RESULTS, cpus_option, engines_option
from ..process import WorkerError
from ..system import describe
from .study import keep, read, table, turns


@click.command()
@click.option("--name", default="families", show_default=True, help="Of the files in results/.")
@click.option("--models", "chosen", default="", help="Only those whose names contain one of these; several with commas.  [default: all]")
@click.option("--kind", default="Q4_0", show_default=True, help="Type of the matrices' blocks.")
@engines_option("mlxinfer,llama.cpp,mlx-lm")
@click.option("--rounds", type=click.IntRange(1, 1000), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(1, 192), default=48, show_default=True, help="Tokens of a turn.")
@click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
@click.option("--folder", type=click.Path(path_type=Path), help="Where models are written and left.  [default: none is left]")
@cpus_option
def families(
    name: str,
    chosen: str,
    kind: str,
    engines: tuple[str, ...],
    rounds: int,
    steps: int,
    threads: int | None,
    folder: Path | None,
    cpus: list[int],
) -> None:
    """Random models of a real small size, in processes that take turns. Adds to results/NAME.csv, and writes its .json and table."""
    from .random_models import models, write

    place = folder or Path(tempfile.mkdtemp())
    try:
        for key, model in models().items():
            if not any(part in key for part in chosen.split(",")):
                continue
            path = place / f"{key}-{kind}.gguf"
            if not path.exists():
                write(path, model, kind)
            count = threads or len(cpus)
            label = f"{key} {kind}, {count} thread{'s' * (count > 1)}"
            found = list(turns(label, path, engines, rounds, steps, count, lambda text: click.echo(text, err=True)))
            keep(RESULTS / f"{name}.csv", found)
    except WorkerError as error:
        raise click.ClickException(str(error)) from error
    finally:
        if folder is None:
            shutil.rmtree(place)
    about = describe() | {"study": "families", "cpus": cpus, "threads": threads or len(cpus), "steps": steps}
    (RESULTS / f"{name}.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = table(read(RESULTS / f"{name}.csv"))
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    click.echo(text)
