"""Commands that each study one thing: the parts of a step, the cost of rounding, the cost and the bytes of a cache."""

from __future__ import annotations

from pathlib import Path

import click

from .batch.command import batch
from .conversions.command import conversion, conversion_tasks
from .families.command import families
from .launches.command import launches
from .options import DEFAULT_MODELS, RESULTS, engines_option, models_option
from .readers import readers
from .serving.command import serving
from .structure import structure
from .structured import structured
from .system import device_name
from .types.command import types


@click.command()
@models_option(*DEFAULT_MODELS)
def precision(models: dict[str, Path]) -> None:
    """What rounding activations to 15 or 8 bits costs, against float32. Writes results/precision.md."""
    from .precision import losses, table

    try:
        text = table({name: losses(path) for name, path in models.items()})
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    (RESULTS / "precision.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command()
@models_option(*DEFAULT_MODELS)
@click.option("--depth", type=click.IntRange(1), default=(1,), show_default=True, multiple=True, help="Tokens in the cache; repeatable.")
def step(models: dict[str, Path], depth: tuple[int, ...]) -> None:
    """The budget of a decode step, with and without the CPU kernels. Writes results/step.md."""
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


@click.command("attention-gpu")
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


@click.command("products-gpu")
@click.option("--seconds", type=click.FloatRange(0.1), default=1.0, show_default=True, help="How long each format is measured.")
def products_gpu(seconds: float) -> None:
    """Products of 1 to 16 rows with quantized matrices, on an Apple or NVIDIA GPU. Writes results/products_gpu.md."""
    from .attention_gpu import copy_bandwidth, missing_gpu
    from .products_gpu import measure, table

    if missing_gpu():
        raise click.ClickException(missing_gpu().replace("attention", "a product", 1))
    copied = copy_bandwidth()
    try:
        text = f"{device_name()}, copying {copied / 1e9:.0f} GB/s\n\n{table(measure(seconds=seconds), copied)}"
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    (RESULTS / "products_gpu.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command("gguf-gpu")
@models_option(*DEFAULT_MODELS)
@click.option("--types", "kinds", default="", help="Only these, such as Q4_K,Q6_K.  [default: all that are rounded]")
def gguf_gpu(models: dict[str, Path], kinds: str) -> None:
    """What it costs to hold GGUF's block types in MLX's formats. Writes results/gguf_gpu.csv and its table."""
    from .gguf_gpu import KINDS, keep, measure, read, table

    wanted = tuple(kinds.split(",")) if kinds else KINDS
    for name, path in models.items():
        try:
            for row in measure(name, path, wanted):
                keep([row], RESULTS / "gguf_gpu.csv")
                click.echo(f"{name} {row.kind}: {row.mean_kl:.1e}", err=True)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    text = table(read(RESULTS / "gguf_gpu.csv"))
    (RESULTS / "gguf_gpu.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command("kv-bytes")
def kv_bytes() -> None:
    """Bytes of the cache that a decode step reads, and the least time for that on Apple's chips. Computed, not measured."""
    from .kv_bytes import tables

    click.echo(tables(), nl=False)


@click.command("links")
@click.option("--gigabytes", type=click.FloatRange(0.1), default=40.0, show_default=True, help="Weights of the model.")
@click.option("--blocks", type=click.IntRange(1), default=80, show_default=True)
@click.option("--hidden", type=click.IntRange(1), default=8192, show_default=True, help="Channels of a row.")
@click.option("--memory-gb-per-s", type=click.FloatRange(1), default=546.0, show_default=True, help="Bandwidth of each Mac's memory.")
@click.option("--latency-us", type=click.FloatRange(0), help="Of one other link, with --gb-per-s.  [default: the usual ones]")
@click.option("--gb-per-s", type=click.FloatRange(0.001), help="Bandwidth of that link.")
def links(gigabytes: float, blocks: int, hidden: int, memory_gb_per_s: float, latency_us: float | None, gb_per_s: float | None) -> None:
    """Tokens per second of one model on 2 to 4 Macs, from what connects them. Computed, not measured."""
    from mlxinfer.distributed.cost import LINKS, Link

    from .links import table

    if (latency_us is None) != (gb_per_s is None):
        raise click.UsageError("--latency-us and --gb-per-s describe one link: give both")
    injected = LINKS if latency_us is None or gb_per_s is None else (Link("injected", latency_us * 1e-6, gb_per_s * 1e9),)
    rows = table(injected, weights=gigabytes * 1e9, blocks=blocks, hidden=hidden, bandwidth=memory_gb_per_s * 1e9)
    click.echo("\n".join(rows))


@click.command("kv-quality")
@models_option(*DEFAULT_MODELS)
@engines_option("mlxinfer,mlx-lm,llama.cpp")
@click.option("--context", "contexts", type=click.IntRange(128), multiple=True, default=(1024,), show_default=True,
              help="Tokens of text; repeatable.")  # fmt: skip
@click.option("--cache", "caches", multiple=True, help="Only these, such as 4 or q8_0; repeatable.  [default: all]")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Of llama.cpp.")
def kv_quality(models: dict[str, Path], engines: tuple[str, ...], contexts: tuple[int, ...], caches: tuple[str, ...], threads: int) -> None:
    """What quantized caches cost. Adds to results/kv_quality.csv, and writes its table and picture."""
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
                keep(row, RESULTS / "kv_quality.csv")
    rows = read(RESULTS / "kv_quality.csv")
    (RESULTS / "kv_quality.md").write_text(table(rows), encoding="utf-8")
    click.echo(table(rows))
    draw(rows, RESULTS / "kv_quality.svg")


@click.command("memory-cap")
@models_option("smollm2")
@click.option("--limit", type=click.Choice(["data", "address space", "outside"]), default=("data",), show_default=True, multiple=True,
              help="Of what; repeatable. From outside: by whoever starts this.")  # fmt: skip
@click.option("--megabytes", type=click.IntRange(100), default=600, show_default=True, help="For the model and all that belongs to it.")
def memory_cap(models: dict[str, Path], limit: tuple[str, ...], megabytes: int) -> None:
    """Work that needs twice the available memory (Linux). Writes results/memory_cap.md; fails if the process did."""
    from .memory_cap import lines, passed, run

    found = [(name, run(path, kind, megabytes)) for name, path in models.items() for kind in limit]
    text = "".join(f"{name}\n\n{lines(each)}\n" for name, each in found)
    (RESULTS / "memory_cap.md").write_text(text, encoding="utf-8")
    click.echo(text)
    if not all(passed(each) for _, each in found):
        raise click.ClickException("this is not how it should end")


@click.command()
@models_option("smollm2")
@click.option("--tokens", type=click.IntRange(100), default=3000, show_default=True, help="Of the conversation, about.")
@click.option("--pairs", type=click.IntRange(1, 100), default=5, show_default=True)
def resume(models: dict[str, Path], tokens: int, pairs: int) -> None:
    """A conversation that goes on in a new process, from disk and read anew. Writes results/resume.md."""
    from .resume import measure, table

    try:
        text = "\n".join(f"{name}: {table(measure(path, tokens, pairs))}" for name, path in models.items())
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    (RESULTS / "resume.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command()
@models_option("smollm2")
@click.option(
    "--streams", type=click.IntRange(1), default=(1, 8), show_default=True, multiple=True, help="Sequences in a step; repeatable."
)
@click.option("--pairs", type=click.IntRange(2), default=40, show_default=True, help="Blocks of 8 steps of each kind.")
def unused(models: dict[str, Path], streams: tuple[int, ...], pairs: int) -> None:
    """What hooks and adapters cost a step of which no sequence has any. Writes results/unused.md."""
    from .unused import measure, table

    text = "\n".join(f"{name}, {pairs} pairs\n\n{table([measure(path, n, pairs) for n in streams])}" for name, path in models.items())
    (RESULTS / "unused.md").write_text(text, encoding="utf-8")
    click.echo(text)


@click.command()
@models_option("smollm2")
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="How often each is interrupted.")
def interrupted(models: dict[str, Path], times: int) -> None:
    """How long a notebook's cell goes on after it was interrupted. Writes results/interrupted.md."""
    from .interrupted import measure, table

    try:
        text = "\n".join(table(name, measure(str(path), times)) for name, path in models.items())
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    (RESULTS / "interrupted.md").write_text(text, encoding="utf-8")
    click.echo(text)


COMMANDS = (
    *(unused, interrupted),
    *(precision, step, attention_gpu, products_gpu, gguf_gpu, kv_bytes, links, kv_quality, launches),
    *(batch, serving, memory_cap, resume, structure, structured, readers, types, conversion, conversion_tasks, families),
)
