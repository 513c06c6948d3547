"""Decodes with each engine in turn, in processes of their own, and keeps wall time and processor time of every turn."""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from ..engines.base import WARM_STEPS
from ..process import Process, WorkerError
from ..system import ROOT
from ..workloads import ONE_AT_A_TIME, OURS, PROMPT

SLOW_STEPS = 4
"""Tokens of a turn of mlx-lm, which takes a second for each."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's turn in a round."""

    model: str
    """Name of the model, its type of blocks, and how many threads an engine has."""
    engine: str
    """Name of the engine."""
    round: int
    """Turns of one round are compared."""
    wall_ms: float
    """Wall time of a token."""
    cpu_ms: float
    """Processor time of a token, of all threads."""
    others: float
    """Share of the processors that other processes used meanwhile."""


def turns(
    name: str, path: Path, engines: Sequence[str], rounds: int, steps: int, threads: int, tell: Callable[[str], None]
) -> Iterator[Turn]:
    """Rounds of one turn for each engine, each time in another order. Raises `WorkerError`."""
    with ExitStack() as stack:
        workers = {}
        for engine in engines:
            worker = stack.enter_context(Process(engine, threads))
            model = converted(path) if engine == ONE_AT_A_TIME else path
            try:
                worker.ask("load", model=str(model), threads=threads, context=1024, prompt=PROMPT)
                worker.ask("decode", depth=1, streams=1, steps=SLOW_STEPS)
            except WorkerError as error:
                tell(f"{name}: left out: {error}")
                continue
            workers[engine] = worker
        for number in range(rounds):
            order = list(workers)
            for engine in order[number % len(order) :] + order[: number % len(order)]:
                count = SLOW_STEPS if engine == ONE_AT_A_TIME else steps
                answer = workers[engine].ask("decode", depth=1, streams=1, steps=count)
                wall, cpu = answer["seconds"] / count, answer["cpu_s"] / (count + WARM_STEPS)
                tell(f"{name}, round {number + 1}: {engine} {wall * 1e3:.2f} ms, {cpu * 1e3:.2f} ms of processors")
                yield Turn(name, engine, number, wall * 1e3, cpu * 1e3, answer["others"])


def converted(path: Path) -> Path:
    """The model for mlx-lm, next to the file; written if it is not there."""
    folder = path.with_suffix("")
    if not folder.exists():
        # MLX's CPU operations are fastest in float32.
        command = [sys.executable, "-m", "mlxinfer", "convert", str(path), str(folder), "--dtype", "float32", "--no-measure"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise WorkerError(done.stderr.strip())
    return folder


def keep(path: Path, found: Sequence[Turn]) -> None:
    """Add turns to a file; those that are there of the same models and engines are replaced."""
    same = {(turn.model, turn.engine) for turn in found}
    rows = [turn for turn in (read(path) if path.exists() else []) if (turn.model, turn.engine) not in same] + list(found)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Turn)], lineterminator="\n")
        writer.writeheader()
        for turn in rows:
            writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in asdict(turn).items()})


def read(path: Path) -> list[Turn]:
    """The turns of a file."""
    types = get_type_hints(Turn)
    with path.open(encoding="utf-8", newline="") as file:
        return [Turn(**{name: types[name](text) for name, text in row.items()}) for row in csv.DictReader(file)]


def table(found: Sequence[Turn]) -> str:
    """A row for each model and other engine: tokens per second by medians, and the medians of the ratios within rounds, with the lowest and
    the highest."""
    lines = ["| model | tokens/s | other engine | tokens/s | ratio, wall | ratio, processor time | rounds |", "|" + " --- |" * 7]
    for model in dict.fromkeys(turn.model for turn in found):
        by_engine = {
            name: {turn.round: turn for turn in found if turn.model == model and turn.engine == name}
            for name in dict.fromkeys(turn.engine for turn in found if turn.model == model)
        }
        ours = by_engine.pop(OURS, {})
        for name, theirs in by_engine.items():
            pairs = [(ours[number], theirs[number]) for number in ours if number in theirs]
            if pairs:
                lines.append(_row(model, name, pairs))
    return "\n".join(lines) + "\n"


def _row(model: str, name: str, pairs: Sequence[tuple[Turn, Turn]]) -> str:
    rates = [1e3 / statistics.median(pair[i].wall_ms for pair in pairs) for i in (0, 1)]
    wall, cpu = ([getattr(b, key) / getattr(a, key) for a, b in pairs] for key in ("wall_ms", "cpu_ms"))
    shown = [f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in (wall, cpu)]
    return f"| {model} | {rates[0]:.1f} | {name} | {rates[1]:.1f} | {shown[0]} | {shown[1]} | {len(pairs)} |"
