"""`python -m benchmarks conversion`."""

from __future__ import annotations

from pathlib import Path

import click

from mlxinfer.loading.resolve import cache_dir

from ..files import publish
from ..options import DEFAULT_MODELS, RESULTS, models_option


@click.command()
@models_option(*DEFAULT_MODELS)
@click.option("--only", multiple=True, help="Ways whose names begin so, such as 'mlxinfer fit'; repeatable.  [default: all]")
@click.option("--seconds", type=float, default=1e9, help="Begin nothing new after so long.  [default: until all is measured]")
@click.option("--folder", type=click.Path(path_type=Path), help="What keeps sources between runs.  [default: in the cache folder]")
def conversion(models: dict[str, Path], only: tuple[str, ...], seconds: float, folder: Path | None) -> None:
    """What conversions lose, ours and others'. Adds what is missing to results/conversion.json; writes its table and picture."""
    from .picture import draw
    from .report import table
    from .study import Study

    study = Study(RESULTS / "conversion.json", folder or cache_dir() / "benchmarks", lambda text: click.echo(text, err=True))
    study.run(models, only, seconds)
    publish(RESULTS / "conversion", table(study.results), lambda file: draw(study.results, file))
