"""`python -m benchmarks step`, `attention-gpu` and `products-gpu`."""

from __future__ import annotations

from pathlib import Path

import click

from ..common import options


def _publish(name: str, text: str) -> None:
    (options.RESULTS / "kernels" / f"{name}.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command()
@options.models(*options.DEFAULT_MODELS)
@click.option("--depth", type=click.IntRange(1), default=(1,), show_default=True, multiple=True, help="Tokens in the cache; repeatable.")
def step(models: dict[str, Path], depth: tuple[int, ...]) -> None:
    """Measure the parts of a decode step, with and without the CPU kernels. Writes results/kernels/step.md."""
    from .step import budgets, table

    text = ""
    for name, path in models.items():
        for tokens in depth:
            text += f"{name}, {tokens} tokens in the cache\n\n{table(budgets(path, tokens))}\n"
    _publish("step", text)


@click.command("attention-gpu")
@click.option("--length", type=click.IntRange(64), default=32768, show_default=True, help="Tokens in the cache of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=(1, 8), show_default=True, multiple=True, help="Sequences; repeatable.")
@click.option("--samples", type=click.IntRange(1), default=10, show_default=True)
def attention_gpu(length: int, batch: tuple[int, ...], samples: int) -> None:
    """Measure attention alone on an Apple or NVIDIA GPU: decode, and prefill of 2048 tokens. Writes results/kernels/attention_gpu.md."""
    from .attention_gpu import HEADS, measure, measure_prefill, prefill_table, table
    from .gpu import copy_bandwidth, device_name, require_gpu

    require_gpu("attention")
    copied = copy_bandwidth()
    text = f"{device_name()}, copying {copied / 1e9:.0f} GB/s, {length} tokens\n"
    for name, heads in HEADS.items():
        for sequences in batch:
            text += f"\n{name}, batch {sequences}\n\n{table(measure(heads, length, sequences, samples), copied)}"
        text += f"\n{name}, prefill of 2048 tokens\n\n{prefill_table(measure_prefill(heads, length, 2048, samples))}"
    _publish("attention_gpu", text)


@click.command("products-gpu")
@click.option("--seconds", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Time for each format.")
def products_gpu(seconds: float) -> None:
    """Measure products of 1 to 16 rows with quantized matrices, on an Apple or NVIDIA GPU. Writes results/kernels/products_gpu.md."""
    from .gpu import copy_bandwidth, device_name, require_gpu
    from .products_gpu import measure, table

    require_gpu("a product")
    copied = copy_bandwidth()
    _publish("products_gpu", f"{device_name()}, copying {copied / 1e9:.0f} GB/s\n\n{table(measure(seconds=seconds), copied)}")
