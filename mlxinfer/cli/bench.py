"""Measure how fast a model runs here, and how close that is to what the machine can do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from platform import python_version
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from .._version import __version__
from .common.console import human_bytes, opened
from .common.model_command import ModelCommand
from .common.options import model_argument, model_options, split

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.machine import Machine
    from ..bench.measure import Measurement

_SHORT_PROMPT = 8


def _counts(least: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """Return a callback that parses `128,512` to (128, 512), sorted without duplicates, and "none" to ()."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        words = [] if value == "none" else [word.strip() for word in value.split(",")]
        if not all(word.isascii() and word.isdigit() and least <= int(word[:10]) < 2**31 for word in words):
            raise click.BadParameter(f"{value!r} is not a list of numbers from {least}, such as {least},128 (or none)")
        return tuple(sorted({int(word) for word in words}))

    return read


_EXAMPLES = """\b
Examples:
  mlxinfer bench smollm2
  mlxinfer bench smollm2 --prefill none --batch 1 --json"""


@click.command(short_help="Measure how fast a model runs here.", cls=ModelCommand, epilog=_EXAMPLES)
@model_argument
@click.option("--prefill", callback=_counts(1), metavar="N,...", default="128,512", show_default=True, help="Lengths of prompts.")
@click.option(
    "--decode-depth", "depths", callback=_counts(0), metavar="N,...", default="0,1024", show_default=True, help="Tokens in the cache."
)
@click.option(
    "--batch", "batches", callback=_counts(1), metavar="N,...", default="1,4,8", show_default=True, help="Sequences decoded together."
)
@click.option("--repeat", type=click.IntRange(1, 1000), default=5, show_default=True, help="Samples of each row.")
@click.option("--steps", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Tokens in a sample of decoding.")
@click.option(
    "--max-seconds",
    type=click.IntRange(0, 10**6),
    default=60,
    show_default=True,
    help="Leave out rows that take longer; 0 leaves none out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
def bench(model: str, as_json: bool, **options: Any) -> None:
    """Measure prefill, decode, load time and memory of MODEL, with prompts of random tokens.

    Every speed is compared with what this machine can do: how fast it reads the bytes and does the operations that the work needs.
    """
    settings, plan = split(options)
    found = _measure(model, settings, plan)
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)


def _measure(model: str, settings: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    from ..bench.machine import measure_machine
    from ..bench.measure import Bench, Workload, measure
    from ..util.device import peak_rss

    # These imports include all that loading needs, so its time excludes imports.
    plan, rows, start = Workload(**chosen), [], perf_counter()
    plain = {"speculate": False, "prefix_cache": False}  # measure the cost of each token
    with opened(model, settings | plain) as llm, _progress() as (tell, done):
        loaded = perf_counter() - start
        Bench(llm.engine).prefill(_SHORT_PROMPT)
        first_token = perf_counter() - start
        for row in measure(llm, plan, tell):
            rows.append(row)
            done(row)
        peak = peak_rss()
        tell("reading, copying, multiplying")
        machine = measure_machine(llm.weight_bytes)
    return {
        "model": llm.name,
        "dtype": str(llm.dtype).rpartition(".")[2],
        "kv": llm.kv.name,
        "weight_bytes": llm.weight_bytes,
        "load_s": loaded,
        "first_token_s": first_token,
        "peak_rss_bytes": peak,
        "rows": [_as_object(row, machine) for row in rows],
        "machine": asdict(machine),
        "versions": {"mlxinfer": __version__, "mlx": version("mlx"), "python": python_version()},
    }


def _as_object(row: Measurement, machine: Machine) -> dict[str, Any]:
    speeds = {"median": row.rate, "lowest": min(row.rates), "highest": max(row.rates)} if row.rates else None
    shares = row.against(machine)
    measured = {"seconds": row.seconds if row.rates else None, "shares": asdict(shares) if shares else None}
    return {"name": row.name, **asdict(row), "tokens_per_s": speeds, **measured}


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[Measurement], None]]]:
    """Show the present measurement and finished rows on a terminal; the rows stay after Ctrl-C."""
    if not sys.stderr.isatty():
        yield lambda _: None, lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        yield (
            lambda text: status.update(f"[dim]{text}"),
            lambda row: console.print(f"[dim]{row.name}: {row.left_out or f'{row.rate:.1f} tok/s'}"),
        )


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    machine, console = found["machine"], Console(highlight=False, soft_wrap=True)
    click.echo(f"{found['model']}: {found['dtype']}, {human_bytes(found['weight_bytes'])} of weights, kv {found['kv']}")
    click.echo(
        f"loaded in {found['load_s']:.2f} s, first token after {found['first_token_s']:.2f} s, peak {human_bytes(found['peak_rss_bytes'])}"
    )
    click.echo(
        f"{machine['device']}, {machine['threads']} threads: reads {human_bytes(machine['read_bytes'])}/s, "
        f"copies {human_bytes(machine['copy_bytes'])}/s, {machine['operations'] / 1e9:.0f} GFLOP/s in {machine['operations_dtype']}"
    )
    if any(row["tokens_per_s"] for row in found["rows"]):
        console.print(_table(found["rows"]))
        click.echo("\n".join(_legend(found)))
    for row in found["rows"]:
        if row["left_out"]:
            click.echo(f"{row['name']}: left out, {row['left_out']}")


def _legend(found: dict[str, Any]) -> list[str]:
    lines = [
        "ms, MB, GFLOP: of a whole prompt, or of one step of decoding",
        "read, mul-add: the share of the speeds above that this reaches",
    ]
    shares = [row["shares"] for row in found["rows"] if row["shares"]]
    if any(share["operations"] > 1 for share in shares):
        dtype = found["machine"]["operations_dtype"]
        lines.append(f"mul-add passes 100 %: packed weights are multiplied as integers, and the speed above is that of {dtype}")
    if any(share["bandwidth"] > 1 for share in shares):
        lines.append("read passes 100 %: part of the weights stays in the processor's cache from one step to the next")
    return lines


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("tokens/s", "range", "ms", "MB", "read", "GFLOP", "mul-add"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if row["tokens_per_s"]:
            table.add_row(row["name"], *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    speeds, cost, shares = row["tokens_per_s"], row["cost"], row["shares"]
    cells = [_number(speeds["median"]), f"{_number(speeds['lowest'])}–{_number(speeds['highest'])}", _number(row["seconds"] * 1000)]
    if cost is None or shares is None:
        return [*cells, *["–"] * 4]
    return [
        *cells,
        _number(cost["bytes"] / 1e6),
        _percent(shares["bandwidth"]),
        _number(cost["operations"] / 1e9),
        _percent(shares["operations"]),
    ]


def _number(value: float) -> str:
    """Return a number with at least three digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
