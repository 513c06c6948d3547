"""The commands: `python -m benchmarks compare` measures, `python -m benchmarks report` shows what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .compare import Comparison, Settings
from .engines import MODULES
from .process import WorkerError
from .report import caption, document
from .samples import Results, Writer, read
from .system import describe, device_name, pin
from .works import works

RESULTS = Path(__file__).parent / "results"
DEFAULT_MODELS = ("smollm2", "gemma3-270m")


def _limits(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    limits = {}
    for value in values:
        engine, _, tokens = value.partition("=")
        if engine not in MODULES or not tokens.isdecimal() or int(tokens) < 1:
            raise click.BadParameter(f"{value!r} is not an engine and a number of tokens, such as mlx-lm=128")
        limits[engine] = int(tokens)
    return limits


def _models(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """`NAME=PATH`, or what mlxinfer finds under a name."""
    from mlxinfer.errors import MLXInferError
    from mlxinfer.loading.resolve import resolve

    found = {}
    for value in values:
        name, _, path = value.partition("=")
        try:
            found[name] = resolve(path or name).path
        except MLXInferError as error:
            raise click.BadParameter(str(error)) from None
    return found


def _engines(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in MODULES:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(MODULES)}")
    return names


def _cpus(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    """The processors that this process, and all that it starts, keep to from here on."""
    words = [] if value is None else value.split(",")
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"{value!r} is not a list of processors, such as 0,1")
    try:
        return pin([int(word) for word in words])
    except (OSError, OverflowError):
        raise click.BadParameter(f"{value!r}: not all of these are processors that may be used here") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """This project beside mlx-lm and llama.cpp, in one run."""


@main.command()
@click.option("--name", default="cpu", show_default=True, help="Of the files in results/.")
@click.option("--model", "models", multiple=True, default=DEFAULT_MODELS, show_default=True, callback=_models, metavar="NAME[=PATH]",
              help="A GGUF file, or a name that mlxinfer knows; repeatable.")  # fmt: skip
@click.option("--engines", default="mlxinfer,llama.cpp,mlx-lm", show_default=True, callback=_engines, help=f"Of {', '.join(MODULES)}.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(1, 192), default=64, show_default=True, help="Tokens of a sample of decoding.")
@click.option("--works", "chosen", default="", help="Only those whose names begin so; several with commas.  [default: all]")
@click.option("--limit", "limits", multiple=True, default=("mlx-lm=128", "mlxinfer-plain=128"), show_default=True, callback=_limits,
              metavar="ENGINE=TOKENS", help="The most tokens that a slow engine gets at once; repeatable.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, 256), help="Of every engine.  [default: one for each processor]")
@click.option("--cpus", callback=_cpus, metavar="N,...", help="Keep to these processors (Linux).  [default: all allowed]")
@click.option("--start/--no-start", default=True, show_default=True, help="Measure whole processes: time to the first token, memory.")
def compare(name: str, models: dict[str, Path], cpus: list[int], threads: int | None, **options: Any) -> None:
    """Measure, and write results/NAME.csv, .json, .md and .svg. What is there already under that name is replaced."""
    chosen = [prefix for prefix in options.pop("chosen").split(",") if prefix]
    kinds = tuple(w for w in works(options["steps"]) if not chosen or w.name.startswith(tuple(chosen)))
    if not kinds:
        raise click.UsageError(f"--works: {', '.join(chosen)} begins none of {', '.join(w.name for w in works(1))}")
    settings = Settings(
        works=kinds, threads=threads or len(cpus), **{key: options[key] for key in ("engines", "rounds", "limits", "start")}
    )
    about = describe() | {"cpus": cpus, "threads": settings.threads, "steps": options["steps"], "limits": settings.limits}
    try:
        measure(RESULTS / name, models, settings, about)
    except WorkerError as error:
        raise click.ClickException(str(error)) from error
    show(RESULTS / name)


def measure(stem: Path, models: dict[str, Path], settings: Settings, about: dict[str, Any]) -> None:
    """Raises `WorkerError`. What was measured until then is kept."""
    about["models"] = {}
    stem.parent.mkdir(exist_ok=True)
    with _file(stem, "csv").open("w", encoding="utf-8", newline="") as file:
        writer = Writer(file)
        for name, path in models.items():
            comparison = Comparison(name, path, settings, lambda text: click.echo(text, err=True))
            about["models"][name] = {"file": path.name, "engines": comparison.about, "left_out": comparison.left_out}
            try:
                for sample in comparison.run():
                    writer.add(sample)
            finally:
                _file(stem, "json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@main.command()
@click.argument("name", default="cpu")
def report(name: str) -> None:
    """Print the tables of results/NAME.csv, and draw its picture again."""
    try:
        show(RESULTS / name)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.option("--model", "models", multiple=True, default=DEFAULT_MODELS, show_default=True, callback=_models, metavar="NAME[=PATH]",
              help="A GGUF file, or a name that mlxinfer knows; repeatable.")  # fmt: skip
def precision(models: dict[str, Path]) -> None:
    """What rounding activations to 15 or 8 bits costs, against float32. Writes results/precision.md."""
    from .precision import losses, table

    try:
        text = table({name: losses(path) for name, path in models.items()})
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    (RESULTS / "precision.md").write_text(text, encoding="utf-8")
    click.echo(text)


@main.command()
@click.option("--model", "models", multiple=True, default=DEFAULT_MODELS, show_default=True, callback=_models, metavar="NAME[=PATH]",
              help="A GGUF file, or a name that mlxinfer knows; repeatable.")  # fmt: skip
@click.option("--depth", type=click.IntRange(1), default=(1,), show_default=True, multiple=True, help="Tokens in the cache; repeatable.")
def step(models: dict[str, Path], depth: tuple[int, ...]) -> None:
    """The budget of a step of decoding, before and after the CPU kernels. Writes results/step.md."""
    from .step import budgets, table

    text = ""
    for name, path in models.items():
        for tokens in depth:
            try:
                text += f"{name}, {tokens} tokens in the cache\n\n{table(budgets(path, tokens))}\n"
            except RuntimeError as error:
                raise click.ClickException(str(error)) from error
    (RESULTS / "step.md").write_text(text, encoding="utf-8")
    click.echo(text)


@main.command("attention-gpu")
@click.option("--length", type=click.IntRange(64), default=32768, show_default=True, help="Tokens in the cache of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=(1, 8), show_default=True, multiple=True, help="Sequences; repeatable.")
@click.option("--samples", type=click.IntRange(1), default=10, show_default=True)
def attention_gpu(length: int, batch: tuple[int, ...], samples: int) -> None:
    """Attention alone, on an Apple or NVIDIA GPU: decode, and prefill of 2048 tokens. Writes results/attention_gpu.md."""
    from .attention_gpu import HEADS, copy_bandwidth, measure, measure_prefill, missing_gpu, prefill_table, table

    if missing_gpu():
        raise click.ClickException(missing_gpu())
    copied = copy_bandwidth()
    text = f"{device_name()}, copying {copied / 1e9:.0f} GB/s, {length} tokens\n"
    for name, heads in HEADS.items():
        for sequences in batch:
            try:
                text += f"\n{name}, batch {sequences}\n\n{table(measure(heads, length, sequences, samples), copied)}"
            except RuntimeError as error:
                raise click.ClickException(str(error)) from error
        text += f"\n{name}, prefill of 2048 tokens\n\n{prefill_table(measure_prefill(heads, length, 2048, samples))}"
    (RESULTS / "attention_gpu.md").write_text(text, encoding="utf-8")
    click.echo(text)


@main.command("kv-bytes")
def kv_bytes() -> None:
    """What a step of decoding reads of the cache, and the time that takes at the least, for Apple's chips. Computed, not measured."""
    from .kv_bytes import tables

    click.echo(tables(), nl=False)


def show(stem: Path) -> None:
    about = json.loads(_file(stem, "json").read_text(encoding="utf-8"))
    samples = read(_file(stem, "csv"))
    models = [Results(name, samples) for name in about["models"]]
    text = document(models, about)
    _file(stem, "md").write_text(text, encoding="utf-8")
    click.echo(text)
    reference = next(engine for engine in ("llama.cpp", "mlx-lm", *models[0].engines) if engine in models[0].engines)
    try:
        from .picture import draw
    except ImportError:
        click.echo("There is no picture without matplotlib: pip install 'mlxinfer[bench]'", err=True)
        return
    draw(models, reference, _file(stem, "svg"), caption(about))


def _file(stem: Path, kind: str) -> Path:
    return stem.with_name(f"{stem.name}.{kind}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
