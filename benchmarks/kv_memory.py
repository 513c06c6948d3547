"""Memory of the cache while a long prompt is read: `python -m benchmarks.kv_memory MODEL --tokens 16384`.

Random tokens are read in steps, as in the engine, in bfloat16, with a cache of each format. Records MLX's memory besides the weights
after each step and at its peak. Writes results/kv_memory.csv and, with matplotlib, .svg.
"""

from __future__ import annotations

import csv
import gc
from pathlib import Path
from time import perf_counter

import click
import mlx.core as mx
import numpy as np

from mlxinfer.cache.base import Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.loading.load import LoadedModel, load

RESULTS = Path(__file__).parent / "results"
Point = tuple[str, int, float, float]
"""Format, tokens read, MB after the step, MB at its peak."""


def measure(loaded: LoadedModel, kv: KVFormat, tokens: int, chunk: int) -> list[Point]:
    model, points = loaded.model, []
    ids = np.random.default_rng(0).integers(0, model.vocab_size, tokens)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = PagedCache(model.layers, dtype=loaded.dtype, kv_cache_tokens=tokens + 64, chunk=chunk, kv=kv)
    slot = cache.open()
    for past in range(0, tokens, chunk):
        count = min(chunk, tokens - past)
        mx.reset_peak_memory()
        # Segment.total grows as tokens are read, so the pool grows as in a conversation.
        step = cache.begin([Segment(slot, 0, count, past, past + count)])
        mx.eval(model.hidden(mx.array(ids[past : past + count], mx.int32), step), step.state)
        cache.commit(step)
        del step
        points.append((kv.name, past + count, (mx.get_active_memory() - before) / 1e6, (mx.get_peak_memory() - before) / 1e6))
    return points


def draw(points: list[Point], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(point[0] for point in points)):
        own = [point for point in points if point[0] == name]
        label = "16 bits (bfloat16)" if name == "16" else f"--kv {name}"
        axes.plot([p[1] for p in own], [p[3] for p in own], color=f"C{number}", linewidth=1, label=f"{label}: peak of a step")
        axes.plot([p[1] for p in own], [p[2] for p in own], color=f"C{number}", linestyle="--", linewidth=1, label=f"{label}: after it")
    axes.set(xlabel="tokens read", ylabel="MB beyond the weights", title=title, xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


@click.command()
@click.argument("model")
@click.option("--tokens", default=16384, show_default=True)
@click.option("--chunk", default=512, show_default=True, help="Tokens of a step.")
@click.option("--kv", "formats", multiple=True, default=("16", "8", "4"), show_default=True)
def main(model: str, tokens: int, chunk: int, formats: tuple[str, ...]) -> None:
    loaded = load(model, dtype="bfloat16")
    points: list[Point] = []
    for name in formats:
        start = perf_counter()
        points += measure(loaded, KVFormat.parse(name), tokens, chunk)
        own = [point for point in points if point[0] == KVFormat.parse(name).name]
        held, peak = own[-1][2], max(point[3] for point in own)
        click.echo(f"kv {name}: {held:.1f} MB held at the end, {peak:.1f} MB at the peak, {perf_counter() - start:.0f} s")
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "kv_memory.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("kv", "tokens", "held_mb", "peak_mb"))
        writer.writerows((kv, read, f"{held:.2f}", f"{peak:.2f}") for kv, read, held, peak in points)
    try:
        draw(points, f"{loaded.name}: reading {tokens} tokens, {chunk} a step", RESULTS / "kv_memory.svg")
    except ModuleNotFoundError:
        click.echo("There is no picture without matplotlib: pip install '.[bench]'", err=True)


if __name__ == "__main__":
    main()
