"""`python -m benchmarks step`, `attention-gpu`, `products-gpu` and `kernels-compile`."""

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
@click.option("--length", type=click.IntRange(64), multiple=True,
              help="Tokens in the cache of each sequence; repeatable.  [default: 1024, 8192 and 32768, as memory allows]")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=(1, 8), show_default=True, multiple=True, help="Sequences; repeatable.")
@click.option("--samples", type=click.IntRange(1), default=10, show_default=True)
def attention_gpu(length: tuple[int, ...], batch: tuple[int, ...], samples: int) -> None:
    """Measure attention alone on an Apple or NVIDIA GPU: decode, and prefill of 2048 tokens. Writes results/kernels/attention_gpu.md."""
    from mlxinfer.util.device import device_memory

    from .attention_gpu import HEADS, LENGTHS, MEMORY_SHARE, case_bytes, measure, measure_prefill, prefill_table, table
    from .gpu import conditions, copy_bandwidth, require_gpu

    require_gpu("attention")
    copied, room = copy_bandwidth(), device_memory().usable * MEMORY_SHARE
    text = f"{conditions()}\n\ncopying {copied / 1e9:.0f} GB/s\n"
    for name, heads in HEADS.items():
        for tokens in length or LENGTHS:
            for sequences in batch:
                title, size = f"{name}, {tokens} tokens, batch {sequences}", case_bytes(heads, tokens, sequences)
                fits = length or size <= room
                body = (
                    table(measure(heads, tokens, sequences, samples), copied)
                    if fits
                    else f"left out: its keys and values take {size / 1e9:.1f} GB\n"
                )
                text += f"\n{title}\n\n{body}"
            text += f"\n{name}, prefill of 2048 tokens after {tokens}\n\n{prefill_table(measure_prefill(heads, tokens, 2048, samples))}"
    _publish("attention_gpu", text)


@click.command("products-gpu")
@click.option("--seconds", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Time for each format.")
def products_gpu(seconds: float) -> None:
    """Measure products of 1 to 16 rows with quantized matrices, on an Apple or NVIDIA GPU. Writes results/kernels/products_gpu.md."""
    from .gpu import conditions, copy_bandwidth, require_gpu
    from .products_gpu import measure, table

    require_gpu("a product")
    copied = copy_bandwidth()
    _publish("products_gpu", f"{conditions()}\n\ncopying {copied / 1e9:.0f} GB/s\n\n{table(measure(seconds=seconds), copied)}")


@click.command("kernels-compile")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Published config; repeatable.  [default: all]")
@click.option("--kv", "formats", multiple=True, default=("16", "8", "4"), show_default=True, help="Format of the cache; repeatable.")
def kernels_compile(models: tuple[str, ...], formats: tuple[str, ...]) -> None:
    """Compile every Metal kernel that published models use, and compare it with plain MLX on small cases. Prints a line per variant, and
    the whole text of the compiler for those that it refuses."""
    from mlxinfer.cache.kv_format import KVFormat

    from ..launches.models import published
    from .compiled_kernels import compile_all, table, trial_kinds

    known = published()
    if unknown := [name for name in models if name not in known]:
        raise click.ClickException(f"{', '.join(unknown)}: not among the published configs {', '.join(known)}")
    kinds = trial_kinds([known[name] for name in models or known], [KVFormat.parse(form) for form in formats])
    try:
        variants, obstacles = compile_all(kinds, click.echo)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"\n{table(variants)}")
    click.echo("".join(f"plain MLX instead of {line}\n" for line in obstacles))
    refused = [variant for variant in variants if variant.error]
    click.echo("".join(f"{variant.line()}:\n\n{variant.error}\n\n" for variant in refused))
    if refused or obstacles:
        raise click.ClickException(
            f"{len(refused)} of {len(variants)} variants refused, {len(obstacles)} of {len(kinds)} trials not passed"
        )
    click.echo(f"{len(variants)} variants compiled, {len(kinds)} trials passed")
