"""Every engine's quantized caches compared with its own 16-bit cache, on the same text."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..loss import Comparison, Loss, Rows
from ..system import ROOT

OURS = ("8", "k8v4", "k6v4", "k5v4", "4", "3", "2")
MLX_LM = (8, 6, 5, 4, 3, 2)
LLAMA_CPP = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q5_0", "q4_0"), ("q4_0", "q4_0"))
PAGE = 64

Run = Callable[[], Iterator[Rows]]


@dataclass(frozen=True, slots=True)
class Row:
    """A cache in one model at one length of text."""

    model: str
    context: int
    engine: str
    cache: str
    bits: float
    loss: Loss

    def flat(self) -> dict[str, object]:
        row: dict[str, object] = asdict(self)
        del row["loss"]
        return row | asdict(self.loss)


@dataclass(frozen=True, slots=True)
class Candidate:
    """`bits`: bits per cached value with its share of scales, for groups of 64 (llama.cpp: 32)."""

    engine: str
    cache: str
    bits: float
    run: Run


def compare(name: str, ids: list[int], exact: Run, candidates: list[Candidate], tell: Callable[[str], None]) -> Iterator[Row]:
    """Each candidate against `exact`, which runs again for each: both sets of logits together would not fit in memory. An engine that
    refuses a cache is left out."""
    for candidate in candidates:
        tell(f"{name}, {len(ids)} tokens: {candidate.engine} {candidate.cache}")
        try:
            yield Row(name, len(ids), candidate.engine, candidate.cache, candidate.bits, _loss(ids, exact(), candidate.run()))
        except ValueError as error:
            tell(f"left out: {error}")


def _loss(ids: list[int], exact: Iterator[Rows], other: Iterator[Rows]) -> Loss:
    found = Comparison()
    done = 0
    for p, q in together(exact, other):
        found.add(p, q, ids[done + 1 : done + 1 + len(p)])
        done += len(p)
    return found.loss(PAGE)


def together(left: Iterator[Rows], right: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Rows of both in pieces of equal size, whatever the sizes they come in."""
    held: list[Rows | None] = [None, None]
    sources = (left, right)
    while True:
        for i, source in enumerate(sources):
            if held[i] is None or not len(held[i]):  # type: ignore[arg-type]
                held[i] = next(source, None)
        mine, other = held
        if mine is None or other is None:
            return
        count = min(len(mine), len(other))
        yield mine[:count], other[:count]
        held = [mine[count:], other[count:]]


def ours(model: Path, ids: list[int]) -> tuple[Run, list[Candidate]]:
    from . import ours as engine

    def run(kv: str, first16: bool = False) -> Run:
        return partial(engine.logits, model, ids, kv=kv, first16=first16)

    found = [Candidate("mlxinfer", kv, engine.bits_per_value(kv), run(kv)) for kv in OURS]
    return run("16"), [*found, Candidate("mlxinfer", "4, first page 16", engine.bits_per_value("4"), run("4", first16=True))]


def mlx_lm(folder: Path, ids: list[int]) -> tuple[Run, list[Candidate]]:
    from . import mlx_lm_cache as engine

    def run(bits: int | None) -> Run:
        return partial(engine.logits, folder, ids, bits=bits)

    return run(None), [Candidate("mlx-lm", str(bits), bits + engine.SCALE_BITS, run(bits)) for bits in MLX_LM]


def llama_cpp(model: Path, ids: list[int], threads: int) -> tuple[Run, list[Candidate]]:
    from . import llama_cpp_cache as engine

    def run(keys: str, values: str) -> Run:
        return partial(engine.logits, model, ids, keys=keys, values=values, threads=threads)

    found = []
    for keys, values in LLAMA_CPP:
        bits = (engine.BITS[keys] + engine.BITS[values]) / 2
        found.append(Candidate("llama.cpp", keys if keys == values else f"{keys}/{values}", bits, run(keys, values)))
    return run("f16", "f16"), found


def measure(
    name: str, model: Path, ids: list[int], engines: tuple[str, ...], caches: tuple[str, ...], threads: int, tell: Callable[[str], None]
) -> Iterator[Row]:
    """`caches`: only these, or all if empty."""
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            if engine == "mlxinfer":
                exact, candidates = ours(model, ids)
            elif engine == "llama.cpp":
                exact, candidates = llama_cpp(model, ids, threads)
            else:
                exact, candidates = mlx_lm(converted(model, Path(folder) / "model"), ids)
            yield from compare(name, ids, exact, [c for c in candidates if not caches or c.cache in caches], tell)


def converted(model: Path, folder: Path) -> Path:
    """A lossless copy for mlx-lm, which does not read such GGUF files."""
    if model.is_dir():
        return model
    command = [sys.executable, "-m", "mlxinfer", "convert", str(model), str(folder), "--dtype", "float32", "--no-measure"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return folder


COLUMNS = ("model", "context", "engine", "cache", "bits", "tokens", "mean_kl", "high_kl", "highest_kl", "same_top", "perplexity")


def keep(row: Row, path: Path) -> None:
    """Add to a file of results: a row replaces an earlier measurement of the same thing."""
    kept = {_what(other): other for other in read(path)}
    flat = {key: f"{value:.5g}" if isinstance(value, float) else str(value) for key, value in row.flat().items()}
    kept[_what(flat)] = flat
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _what(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[key] for key in ("model", "context", "engine", "cache"))


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a table for each model and length of text."""
    text = ""
    for model, context in dict.fromkeys((row["model"], row["context"]) for row in rows):
        text += f"\n{model}, {context} tokens\n\n| engine | cache | bits a value | KL, mean | KL, 99 % | same top token | perplexity |\n"
        text += "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        for row in rows:
            if (row["model"], row["context"]) == (model, context):
                text += _line(row)
    return text.lstrip()


def _line(row: dict[str, str]) -> str:
    kl, high, top, perplexity = (float(row[key]) for key in ("mean_kl", "high_kl", "same_top", "perplexity"))
    cells = (row["engine"], row["cache"], row["bits"], f"{kl:.2g}", f"{high:.2g}", f"{top:.1%}", f"x{perplexity:.3f}")
    return f"| {' | '.join(cells)} |\n"
