"""`python -m benchmarks experts`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlxinfer.expert_offload.disk_speed import read_speed

from ..common import options
from ..common.process import Process, WorkerError
from ..common.report import caption, markdown
from ..common.system import describe
from .cap import MemoryCap, drop_file, read_ahead
from .models import ROUTINGS, SHAPES, first_token, make_model

ENGINES = ("mlxinfer", "llama.cpp")
_LOADING = 2**33
"""Bytes beyond the model's size that a process may use while it loads."""
_MB, _GB = 1e6, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one engine did with one routing under one cap."""

    shape: str
    share: float
    """Share of the experts' bytes for which the cap has memory."""
    engine: str
    routing: str
    decode: dict[str, Any]
    prefill: dict[str, Any]
    memory: dict[str, Any]
    load: dict[str, Any]
    cap: int
    """Bytes of the control group; 0 without one."""
    disk: float
    """Bytes per second of random reads of whole experts, measured before the engine started."""

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return float(self.decode["steps"] / self.decode["seconds"])

    @property
    def prefill_rate(self) -> float:
        return float(self.prefill["tokens"] / self.prefill["seconds"])

    @property
    def token_bytes(self) -> float | None:
        """Bytes read for a token of an answer."""
        return self.decode["bytes"] / self.decode["steps"] if "bytes" in self.decode else None

    @property
    def read_speed(self) -> float | None:
        """Bytes read per second of decoding."""
        return self.decode["bytes"] / self.decode["seconds"] if "bytes" in self.decode else None


def _words(possible: tuple[str, ...], option: str) -> Any:
    return lambda ctx, param, value: options.split_words(value, possible, option)


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    try:
        found = [int(word) / 100 for word in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of percentages, such as 100,50") from None
    if not all(0 < share <= 1 for share in found):
        raise click.BadParameter("a cap is 1 to 100 percent")
    return found


@click.command("experts")
@click.option("--folder", type=click.Path(path_type=Path), required=True,
              help="For models of 5 GB each and as many repacked experts; kept for the next run.")  # fmt: skip
@click.option("--shapes", default=",".join(SHAPES), show_default=True, callback=_words(tuple(SHAPES), "--shapes"))
@click.option("--caps", default="100,70,50,30", show_default=True, callback=_shares, help="Percent of the experts' bytes.")
@click.option("--routings", default=",".join(ROUTINGS), show_default=True, callback=_words(ROUTINGS, "--routings"))
@click.option("--engines", default=",".join(ENGINES), show_default=True, callback=_words(ENGINES, "--engines"))
@click.option("--steps", default=32, show_default=True, type=click.IntRange(2, 400), help="Measured tokens of an answer.")
@click.option("--warm", default=24, show_default=True, type=click.IntRange(1, 400), help="Tokens before them.")
@click.option("--prompt", default=256, show_default=True, type=click.IntRange(2, 900), help="Tokens of a prompt.")
@click.option("--headroom", default=0.9, show_default=True, type=float, metavar="GB", help="Of a cap, besides all weights in memory.")
@options.threads
@options.cpus
@options.name("experts")
def experts(
    folder: Path,
    shapes: tuple[str, ...],
    caps: list[float],
    routings: tuple[str, ...],
    engines: tuple[str, ...],
    steps: int,
    warm: int,
    prompt: int,
    headroom: float,
    threads: int | None,
    cpus: list[int],
    name: str,
) -> None:
    """Run random mixtures of experts whose file is larger than the memory, with this project and with llama.cpp's mapped file.

    Both engines read one GGUF file, in a control group that counts cached pages. The group has memory for the dense weights, a headroom
    and a share of the experts. Writes results/experts/NAME.md and NAME.json.
    """
    path = options.result_path("experts", name)
    path.parent.mkdir(exist_ok=True)
    threads = threads or len(cpus)
    jobs = {"steps": steps, "warm": warm, "prompt": prompt}
    folder.mkdir(parents=True, exist_ok=True)
    about = {**describe(), "threads": threads, "study": "experts", **jobs, "headroom_gb": headroom, "read_ahead_kb": read_ahead(folder)}
    found: list[Case] = []
    for shape in shapes:
        options.tell(f"{shape}: the model")
        model = make_model(shape, folder)
        for share in caps:
            for engine in engines:
                options.tell(f"{shape}: {engine} at {share:.0%}")
                try:
                    found += _measure(shape, model, share, engine, routings, jobs, int(headroom * _GB), threads)
                except (WorkerError, OSError) as error:
                    options.tell(f"left out: {error}")
        _store(path, about, found)
    click.echo(path.with_suffix(".md").read_text(encoding="utf-8"))


def _store(path: Path, about: dict[str, Any], found: list[Case]) -> None:
    """Write the results so far."""
    path.with_suffix(".json").write_text(json.dumps({**about, "cases": [asdict(each) for each in found]}, indent=1) + "\n")
    ahead = f" The kernel reads {about['read_ahead_kb']} KB ahead in mapped files." if about["read_ahead_kb"] else ""
    path.with_suffix(".md").write_text(f"{caption(about)}{ahead}\n\n{table(found)}", encoding="utf-8")


def _measure(
    shape: str, model: Path, share: float, engine: str, routings: tuple[str, ...], jobs: dict[str, int], headroom: int, threads: int
) -> Iterator[Case]:
    """Load the model once, then run every routing. Raises `WorkerError`."""
    sizes = SHAPES[shape]
    dense = model.stat().st_size - sizes.all_experts
    limit = dense + headroom + int(share * sizes.all_experts)
    os.environ["MLXINFER_HOME"] = str(model.parent / "cache")
    with ExitStack() as stack:
        group = _group(stack)
        command = [sys.executable, "-m", "benchmarks.experts.worker", engine]
        drop_file(model)
        disk = read_speed(model, sizes.expert_bytes, 2.0) or 0.0
        worker = stack.enter_context(Process(engine, threads, command=group.command(command) if group else command))
        if group:
            group.set(limit + _LOADING)
        load = worker.ask("load", model=str(model), threads=threads, share=share)
        if group:
            group.set(limit)
        for routing in routings:
            first = first_token(routing)
            prefill = worker.ask("prefill", first=first, tokens=jobs["prompt"])
            decode = worker.ask("decode", first=first, warm=jobs["warm"], steps=jobs["steps"])
            memory = worker.ask("memory") | ({"group": group.usage(), "group_swap": group.swapped()} if group else {})
            yield Case(
                shape=shape,
                share=share,
                engine=engine,
                routing=routing,
                decode=decode,
                prefill=prefill,
                memory=memory,
                load=load,
                cap=limit if group else 0,
                disk=disk,
            )


def _group(stack: ExitStack) -> MemoryCap | None:
    try:
        return stack.enter_context(MemoryCap())
    except OSError as error:
        options.tell(f"no cap on the process ({error}): llama.cpp may cache the whole file")
        return None


_HEAD = (
    *("model", "cap", "routing", "engine", "tokens/s", "prefill tokens/s", "MB read a token", "MB/s", "of the disk"),
    *("of the possible", "hits", "RSS GB", "swap"),
)


def table(cases: list[Case]) -> str:
    """Return the results in Markdown."""
    whole = {(each.shape, each.engine, each.routing): each.rate for each in cases if each.share == 1}
    rows = [list(_HEAD), *(_row(each, whole.get((each.shape, each.engine, each.routing))) for each in cases)]
    return "\n".join([markdown(rows), *_ratios(cases)]) + "\n"


def _row(case: Case, whole: float | None) -> list[str]:
    nbytes, speed = case.token_bytes, case.read_speed
    chosen = case.decode.get("hits", 0) + case.decode.get("misses", 0)
    wrong = "" if case.decode["right"] == 1 else f" ({case.decode['right']:.0%} right)"
    return [
        *(case.shape, f"{case.share:.0%}", case.routing, f"{case.engine}{wrong}", f"{case.rate:.2f}", f"{case.prefill_rate:.1f}"),
        *("" if nbytes is None else f"{nbytes / _MB:.0f}", "" if speed is None else f"{speed / _MB:.0f}", _part(speed, case.disk)),
        *(_part(case.rate, _possible(case, whole)), f"{case.decode['hits'] / chosen:.0%}" if chosen else ""),
        *(f"{case.memory['peak_rss'] / _GB:.2f}", str(case.memory["swap"] + case.memory.get("group_swap", 0))),
    ]


def _possible(case: Case, whole: float | None) -> float | None:
    """Tokens per second that the disk and the processor allow: the slower of the disk alone and of a run with all experts in memory."""
    if not case.token_bytes or not case.disk:
        return whole
    rates = [case.disk / case.token_bytes, *([whole] if whole else [])]
    return min(rates)


def _ratios(cases: list[Case]) -> Iterator[str]:
    """Compare both engines under each cap."""
    others = {(each.shape, each.share, each.routing): each for each in cases if each.engine == "llama.cpp"}
    for each in cases:
        other = others.get((each.shape, each.share, each.routing))
        if each.engine == "mlxinfer" and other:
            ratio, prefill = each.rate / other.rate, each.prefill_rate / other.prefill_rate
            yield f"- {each.shape}, {each.share:.0%}, {each.routing}: {ratio:.2f}x llama.cpp in decoding, {prefill:.2f}x in prefill"


def _part(value: float | None, whole: float | None) -> str:
    return f"{value / whole:.0%}" if value and whole else ""
