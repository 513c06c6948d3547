"""`python -m benchmarks compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from ..common import options, study
from ..common.report import caption, document
from ..common.system import describe
from ..engines import MODULES
from .comparison import Comparison, Settings
from .workloads import START, kv_works, works


@click.command()
@options.name("cpu")
@options.models(*options.DEFAULT_MODELS)
@options.engines("mlxinfer,llama.cpp,mlx-lm")
@options.rounds(5)
@click.option("--steps", type=click.IntRange(1, 192), default=64, show_default=True, help="Tokens of a sample of decoding.")
@click.option("--cache", is_flag=True, help="Only decoding after 4096 tokens in a cache of 16, 8 and 4 bits.")
@click.option("--works", "prefixes", default="", help="Only works with these prefixes, separated by commas; start: whole processes only.")
@options.limits(MODULES, "mlx-lm=128", "mlxinfer-plain=128")
@options.threads
@options.cpus
@click.option("--start/--no-start", default=True, show_default=True, help="Measure whole processes: time to the first token, memory.")
def compare(
    name: str,
    models: dict[str, Path],
    cpus: list[int],
    threads: int | None,
    cache: bool,
    prefixes: str,
    steps: int,
    start: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Measure, and write results/compare/NAME.csv, .json, .md and .svg. Existing results of that name are replaced."""
    possible = {work.name: work for work in (kv_works(steps) if cache else works(steps))}
    names = [*possible, START.name] if start else list(possible)
    kinds = tuple(possible[each] for each in options.with_prefixes(prefixes, names) if each in possible)
    settings = Settings(works=kinds, threads=threads or len(cpus), start=start, **given)
    about = describe() | {"cpus": cpus, "threads": settings.threads, "steps": steps, "limits": settings.limits}
    path = options.result_path("compare", name)
    study.measure(path, models, partial(Comparison, settings=settings, tell=options.tell), about)
    show(path, about)


def show(path: Path, about: dict[str, Any]) -> None:
    """Show stored results."""
    models = study.stored_results(path, about)
    reference = next(engine for engine in ("llama.cpp", "mlx-lm", *models[0].engines) if engine in models[0].engines)

    def draw(file: Path) -> None:
        from ..common.picture import draw

        draw(models, reference, file, caption(about))

    study.publish(path, document(models, about), draw)
