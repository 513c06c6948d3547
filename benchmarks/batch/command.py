"""`python -m benchmarks batch`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..files import measure, place, publish
from ..options import cpus_option, models_option, stem
from ..process import WorkerError
from ..samples import Results, read
from ..system import describe

STUDY = "batch"
"""Name of the study in the results."""


def _limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    from .workloads import WORKS

    engines = {engine for work in WORKS for engine in work.engines}
    found = {}
    for value in values:
        engine, _, tokens = value.partition("=")
        if engine not in engines or not tokens.isdecimal() or int(tokens) < 1:
            raise click.BadParameter(f"{value!r} is not an engine and a number of tokens, such as mlx-lm-server=128")
        found[engine] = int(tokens)
    return found


def _streams(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and 0 < int(word) <= 16 for word in value.split(",")):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 to 16, such as 1,8")
    return tuple(sorted({int(word) for word in value.split(",")}))


@click.command()
@click.option("--name", default="batch", show_default=True, help="Of the files in results/.")
@models_option("smollm2")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option("--works", "chosen", default="", help="Only those whose names begin so; several with commas.  [default: all]")
@click.option("--engines", "engine_names", default="", help="Only these; several with commas.  [default: all]")
@click.option("--prompt", type=click.IntRange(64), default=4096, show_default=True, help="Tokens of the long prompt.")
@click.option("--steps", type=click.IntRange(2, 1024), default=128, show_default=True, help="Tokens of each of many streams.")
@click.option("--streams", default="1,2,4,8,16", show_default=True, callback=_streams)
@click.option("--turns", type=click.IntRange(1, 10), default=10, show_default=True, help="Of the conversation.")
@click.option("--limit", "limits", multiple=True, default=("mlx-lm=128", "mlx-lm-server=128"), show_default=True, callback=_limits,
              metavar="ENGINE=TOKENS", help="The longest prompt of a slow engine; repeatable.")  # fmt: skip
@click.option(
    "--llama-server",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The program.  [default: $LLAMA_SERVER, or on the PATH]",
)
@click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
@cpus_option
def batch(name: str, models: dict[str, Path], cpus: list[int], threads: int | None, llama_server: Path | None, **options: Any) -> None:
    """Many streams, long prompts during them, reused prefixes, conversations, drafts. Writes results/NAME.csv, .json, .md and .svg."""
    from .servers import PATH_VARIABLE
    from .study import Settings, Study
    from .workloads import Plan

    if llama_server:
        os.environ[PATH_VARIABLE] = str(llama_server.absolute())
    plan = Plan(**{key: options[key] for key in ("prompt", "steps", "streams", "turns")})
    kept = {key: options[key] for key in ("rounds", "limits")}
    settings = Settings(threads=threads or len(cpus), plan=plan, **kept, **_chosen(options["chosen"], options["engine_names"]))
    about = (
        describe()
        | {"study": STUDY, "cpus": cpus, "threads": settings.threads}
        | {key: options[key] for key in ("prompt", "steps", "limits")}
    )
    try:
        measure(stem("batch", name), models, partial(Study, settings=settings, tell=lambda text: click.echo(text, err=True)), about)
    except WorkerError as error:
        raise click.ClickException(str(error)) from error
    show(stem("batch", name), about)


def _chosen(works: str, engines: str) -> dict[str, Any]:
    from .workloads import WORKS

    prefixes = tuple(word for word in works.split(",") if word)
    kinds = tuple(work for work in WORKS if not prefixes or work.name.startswith(prefixes))
    if not kinds:
        raise click.UsageError(f"--works: {works} begins none of {', '.join(work.name for work in WORKS)}")
    possible = dict.fromkeys(engine for work in WORKS for engine in work.engines)
    names = [word for word in engines.split(",") if word]
    for name in names:
        if name not in possible:
            raise click.UsageError(f"--engines: {name!r} is not one of {', '.join(possible)}")
    return {"works": kinds, "engines": tuple(names or possible)}


def show(path: Path, about: dict[str, Any]) -> None:
    """The tables and the picture of stored results."""
    from .report import caption, document

    samples = read(place(path, "csv"))
    models = [Results(name, samples) for name in about["models"]]

    def picture(file: Path) -> None:
        from .picture import draw

        draw(models[0], file, caption(about))

    publish(path, document(models, about), picture)
