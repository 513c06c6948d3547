"""The commands: `python -m benchmarks compare` measures, `python -m benchmarks report` shows stored results."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from .batch.command import STUDY
from .batch.command import show as show_batch
from .compare import Comparison, Settings
from .files import measure, place, publish
from .launches.command import STUDY as LAUNCHES
from .launches.command import show as show_launches
from .options import DEFAULT_MODELS, cpus_option, engines_option, limits_option, models_option, stem, stored
from .process import WorkerError
from .report import caption, document
from .samples import Results, read
from .serving.command import STUDY as SERVING
from .serving.command import show as show_serving
from .studies import COMMANDS
from .system import describe
from .workloads import START, kv_works, works


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Compare this project with mlx-lm and llama.cpp, in one run."""


@main.command()
@click.option("--name", default="cpu", show_default=True, help="Of the files in results/.")
@models_option(*DEFAULT_MODELS)
@engines_option("mlxinfer,llama.cpp,mlx-lm")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(1, 192), default=64, show_default=True, help="Tokens of a sample of decoding.")
@click.option("--cache", "caches", is_flag=True, help="Decoding behind 4096 tokens in a cache of 16, 8 and 4 bits, and nothing else.")
@click.option(
    "--works",
    "chosen",
    default="",
    help="Only those whose names begin so, several with commas; start: whole processes only.  [default: all]",
)
@limits_option
@click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
@cpus_option
@click.option("--start/--no-start", default=True, show_default=True, help="Measure whole processes: time to the first token, memory.")
def compare(name: str, models: dict[str, Path], cpus: list[int], threads: int | None, **options: Any) -> None:
    """Measure, and write results/NAME.csv, .json, .md and .svg. Existing results of that name are replaced."""
    chosen = [prefix for prefix in options.pop("chosen").split(",") if prefix]
    possible = kv_works(options["steps"]) if options.pop("caches") else works(options["steps"])
    kinds = tuple(w for w in possible if not chosen or w.name.startswith(tuple(chosen)))
    if not kinds and not (START.name in chosen and options["start"]):
        raise click.UsageError(f"--works: {', '.join(chosen)} begins none of {', '.join(w.name for w in (*works(1), START))}")
    settings = Settings(
        works=kinds, threads=threads or len(cpus), **{key: options[key] for key in ("engines", "rounds", "limits", "start")}
    )
    about = describe() | {"cpus": cpus, "threads": settings.threads, "steps": options["steps"], "limits": settings.limits}
    try:
        measure(stem("compare", name), models, partial(Comparison, settings=settings, tell=lambda text: click.echo(text, err=True)), about)
    except WorkerError as error:
        raise click.ClickException(str(error)) from error
    show(stem("compare", name))


@main.command()
@click.argument("name", default="cpu")
def report(name: str) -> None:
    """Print the tables of the stored results NAME, and draw their picture again."""
    try:
        show(stored(name))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def show(path: Path) -> None:
    about = json.loads(place(path, "json").read_text(encoding="utf-8"))
    if about.get("study") == STUDY:
        show_batch(path, about)
        return
    if about.get("study") == SERVING:
        show_serving(path, about)
        return
    if about.get("study") == LAUNCHES:
        show_launches(path, about)
        return
    if "study" in about:
        raise ValueError(f"{path.name}: the study {about['study']} is finished, and its tables are in {place(path, 'md')}")
    samples = read(place(path, "csv"))
    models = [Results(name, samples) for name in about["models"]]
    reference = next(engine for engine in ("llama.cpp", "mlx-lm", *models[0].engines) if engine in models[0].engines)

    def picture(file: Path) -> None:
        from .picture import draw

        draw(models, reference, file, caption(about))

    publish(path, document(models, about), picture)


for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
