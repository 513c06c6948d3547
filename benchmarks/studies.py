"""Commands that each study one thing: the parts of a step, the cost of rounding, the cost and the bytes of a cache."""

from __future__ import annotations

from pathlib import Path

import click

from .batch.command import batch
from .conversions.command import conversion
from .launches.command import launches
from .options import DEFAULT_MODELS, RESULTS, engines_option, models_option
from .serving.command import serving
from .structure import structure
from .system import device_name


@click.command()
@models_option(*DEFAULT_MODELS)
@click.option("--depth", type=click.IntRange(1), default=(1,), show_default=True, multiple=True, help="Tokens in the cache; repeatable.")
def step(models: dict[str, Path], depth: tuple[int, ...]) -> None:
    """The budget of a decode step, with and without the CPU kernels. Writes results/kernels/step.md."""
    from .step import budgets, table

    text = ""
    for name, path in models.items():
        for tokens in depth:
            try:
                text += f"{name}, {tokens} tokens in the cache\n\n{table(budgets(path, tokens))}\n"
            except RuntimeError as error:
                raise click.ClickException(str(error)) from error
    (RESULTS / "kernels/step.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command("attention-gpu")
@click.option("--length", type=click.IntRange(64), default=32768, show_default=True, help="Tokens in the cache of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=(1, 8), show_default=True, multiple=True, help="Sequences; repeatable.")
@click.option("--samples", type=click.IntRange(1), default=10, show_default=True)
def attention_gpu(length: int, batch: tuple[int, ...], samples: int) -> None:
    """Attention alone, on an Apple or NVIDIA GPU: decode, and prefill of 2048 tokens. Writes results/kernels/attention_gpu.md."""
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
    (RESULTS / "kernels/attention_gpu.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command("products-gpu")
@click.option("--seconds", type=click.FloatRange(0.1), default=1.0, show_default=True, help="How long each format is measured.")
def products_gpu(seconds: float) -> None:
    """Products of 1 to 16 rows with quantized matrices, on an Apple or NVIDIA GPU. Writes results/kernels/products_gpu.md."""
    from .attention_gpu import copy_bandwidth, missing_gpu
    from .products_gpu import measure, table

    if missing_gpu():
        raise click.ClickException(missing_gpu().replace("attention", "a product", 1))
    copied = copy_bandwidth()
    try:
        text = f"{device_name()}, copying {copied / 1e9:.0f} GB/s\n\n{table(measure(seconds=seconds), copied)}"
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    (RESULTS / "kernels/products_gpu.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command("kv-quality")
@models_option(*DEFAULT_MODELS)
@engines_option("mlxinfer,mlx-lm,llama.cpp")
@click.option("--context", "contexts", type=click.IntRange(128), multiple=True, default=(1024,), show_default=True,
              help="Tokens of text; repeatable.")  # fmt: skip
@click.option("--cache", "caches", multiple=True, help="Only these, such as 4 or q8_0; repeatable.  [default: all]")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Of llama.cpp.")
def kv_quality(models: dict[str, Path], engines: tuple[str, ...], contexts: tuple[int, ...], caches: tuple[str, ...], threads: int) -> None:
    """What quantized caches cost. Adds to results/kv/kv_quality.csv, and writes its table and picture."""
    from mlxinfer.loading.load import load_tokenizer, open_checkpoint

    from .kv.picture import draw
    from .kv.quality import keep, measure, read, table
    from .kv.text import text

    for name, path in models.items():
        checkpoint = open_checkpoint(path)
        try:
            ids = load_tokenizer(checkpoint).encode(text())
        finally:
            checkpoint.close()
        for context in contexts:
            for row in measure(name, path, ids[:context], engines, caches, threads, lambda text: click.echo(text, err=True)):
                keep(row, RESULTS / "kv/kv_quality.csv")
    rows = read(RESULTS / "kv/kv_quality.csv")
    (RESULTS / "kv/kv_quality.md").write_text(table(rows), encoding="utf-8")
    click.echo(table(rows))
    draw(rows, RESULTS / "kv/kv_quality.svg")


COMMANDS = (attention_gpu, batch, conversion, kv_quality, launches, products_gpu, serving, step, structure)
