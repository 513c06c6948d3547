"""`python -m benchmarks batch`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from ..common import options, study
from ..common.system import describe
from .workloads import ENGINES, WORKS, Plan


def _streams(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and 0 < int(word) <= 16 for word in value.split(",")):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 to 16, such as 1,8")
    return tuple(sorted({int(word) for word in value.split(",")}))


@click.command()
@options.name("batch")
@options.models("smollm2")
@options.rounds(3)
@click.option("--works", "prefixes", default="", help="Only works with these prefixes, separated by commas.  [default: all]")
@click.option("--engines", default="", help="Only these, separated by commas.  [default: all]")
@click.option("--prompt", type=click.IntRange(64), default=4096, show_default=True, help="Tokens of the long prompt.")
@click.option("--steps", type=click.IntRange(2, 1024), default=128, show_default=True, help="Tokens of each of many streams.")
@click.option("--streams", default="1,2,4,8,16", show_default=True, callback=_streams)
@click.option("--turns", type=click.IntRange(1, 10), default=10, show_default=True, help="Of the conversation.")
@options.limits(ENGINES, "mlx-lm=128", "mlx-lm-server=128")
@options.llama_server
@options.threads
@options.cpus
def batch(
    name: str, models: dict[str, Path], cpus: list[int], threads: int | None, prefixes: str, engines: str, rounds: int,
    limits: dict[str, int], **lengths: Any,
) -> None:  # fmt: skip
    """Many streams, long prompts during them, reused prefixes, conversations, drafts. Writes results/batch/NAME.*."""
    from .study import BatchStudy, Settings

    kinds = options.with_prefixes(prefixes, [work.name for work in WORKS])
    settings = Settings(
        rounds, threads or len(cpus), Plan(**lengths), tuple(work for work in WORKS if work.name in kinds),
        options.split_words(engines, ENGINES, "--engines") or ENGINES, limits,
    )  # fmt: skip
    about = describe() | {"study": "batch", "cpus": cpus, "threads": settings.threads}
    about |= {"prompt": lengths["prompt"], "steps": lengths["steps"], "limits": limits}
    path = options.result_path("batch", name)
    study.measure(path, models, partial(BatchStudy, settings=settings, tell=options.tell), about)
    show(path, about)


def show(path: Path, about: dict[str, Any]) -> None:
    """Show stored results."""
    from .report import document

    models = study.stored_results(path, about)
    study.publish(path, document(models, about))
