"""`python -m benchmarks conversion`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mlxinfer.loading.find.resolve import cache_dir

from ..files import publish
from ..options import DEFAULT_MODELS, RESULTS, models_option

_pieces = click.option(
    "--pieces", type=click.IntRange(1), default=6, show_default=True, help="Of 8,192 tokens of samples each, to calibrate with."
)


@click.command()
@models_option(*DEFAULT_MODELS)
@click.option("--only", multiple=True, help="Ways whose names begin so, such as 'mlxinfer fit'; repeatable.  [default: all]")
@click.option("--seconds", type=float, default=1e9, help="End what still runs after so long.  [default: until all is measured]")
@click.option("--folder", type=click.Path(path_type=Path), help="Keeps sources and points between runs.  [default: in the cache folder]")
@click.option("--jobs", "side_by_side", type=click.IntRange(1, 256), default=1, show_default=True, help="Points measured side by side.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Processors of each.")
@_pieces
@click.option("--afresh", is_flag=True, help="Drop the results that are stored, those of other models too.")
def conversion(
    models: dict[str, Path],
    only: tuple[str, ...],
    seconds: float,
    folder: Path | None,
    side_by_side: int,
    threads: int,
    pieces: int,
    afresh: bool,
) -> None:
    """What conversions lose, ours and others'. Measures what the folder has no point of, each in a process of its own; interrupted, it goes
    on there. Writes results/conversion/conversion.json, its table and picture."""
    from .jobs import run
    from .report import table
    from .step import jobs
    from .study import merged, write

    room, stored = (folder or cache_dir() / "benchmarks").absolute(), RESULTS / "conversion/conversion.json"

    def tell(text: str) -> None:
        click.echo(text, err=True)

    def picture(file: Path) -> None:
        from .picture import draw

        draw(results, file)

    left = run(jobs(models, room, only, pieces), side_by_side=side_by_side, threads=threads, seconds=seconds, logs=room / "logs", tell=tell)
    results = merged([] if afresh else json.loads(stored.read_text(encoding="utf-8")), room)
    write(results, stored)
    publish(RESULTS / "conversion/conversion", table(results), picture)
    if left:
        tell(f"not measured: {', '.join(left)}")
