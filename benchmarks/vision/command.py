"""`python -m benchmarks vision`."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click

from ..common import options
from ..common.process import Process
from ..common.report import caption
from ..common.system import describe
from .towers import CASES

ENGINES = ("mlxinfer", "mlxinfer-plain", "llama.cpp")
Times = dict[str, list[tuple[float, float]]]
"""Seconds and processor seconds of each image, by engine."""


def _words(possible: tuple[str, ...], option: str) -> object:
    return lambda ctx, param, value: options.split_words(value, possible, option)


@click.command("vision")
@click.option("--towers", default=",".join(CASES), show_default=True, callback=_words(tuple(CASES), "--towers"))  # type: ignore[arg-type]
@click.option("--engines", default="mlxinfer,mlxinfer-plain", show_default=True, callback=_words(ENGINES, "--engines"),  # type: ignore[arg-type]
              help=f"Of {', '.join(ENGINES)}.")  # fmt: skip
@click.option("--clip", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The program of vision/clip.cpp.")
@options.rounds(5)
@options.threads
@options.cpus
@options.name("cpu")
def vision(
    towers: tuple[str, ...], engines: tuple[str, ...], clip: Path | None, rounds: int, threads: int | None, cpus: list[int], name: str
) -> None:
    """Measure vision towers with random weights, image by image, in alternating order. Writes results/vision/NAME.md."""
    if "llama.cpp" in engines and clip is None:
        raise click.UsageError("llama.cpp needs --clip: benchmarks/README.md says how to build it")
    threads = threads or len(cpus)
    found = {tower: measure(tower, engines, clip, rounds, threads) for tower in towers}
    text = f"{caption({**describe(), 'threads': threads})}\n\n{table(found)}"
    path = options.result_path("vision", name).with_suffix(".md")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(text)


def measure(tower: str, engines: tuple[str, ...], clip: Path | None, rounds: int, threads: int) -> Times:
    """Encode one image to warm up, then one in each round, with all engines."""
    times: Times = {engine: [] for engine in engines}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for engine in engines:
            command = [sys.executable, "-m", "benchmarks.vision.worker", engine]
            if engine == "llama.cpp":
                from .mmproj import write_mmproj

                write_mmproj(folder / "mmproj.gguf", CASES[tower])
                command = [str(clip), str(folder / "mmproj.gguf"), str(CASES[tower].side), str(threads)]
            worker = stack.enter_context(Process(engine, threads, command=command))
            worker.ask("load", tower=tower)
            worker.ask("encode")
            workers[engine] = worker
        for turn in range(rounds):
            options.tell(f"{tower}: round {turn + 1} of {rounds}")
            for engine in (*engines[turn % len(engines) :], *engines[: turn % len(engines)]):
                answer = workers[engine].ask("encode")
                times[engine].append((answer["seconds"], answer["cpu_s"]))
    return times


def table(found: dict[str, Times]) -> str:
    """Return medians in Markdown, with the lowest and highest seconds in brackets."""
    lines = ["| tower | patches | TFLOP | engine | seconds | processor s | GFLOP per processor s |", "| --- " * 7 + "|"]
    for tower, times in found.items():
        case = CASES[tower]
        for engine, pairs in times.items():
            seconds, used = [pair[0] for pair in pairs], median(pair[1] for pair in pairs)
            spread = f"{median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"
            sizes = f"{(case.side // case.vision['patch_size']) ** 2} | {case.operations() / 1e12:.2f}"
            lines.append(f"| {tower} | {sizes} | {engine} | {spread} | {used:.2f} | {case.operations() / used / 1e9:.0f} |")
    return "\n".join(lines) + "\n"
