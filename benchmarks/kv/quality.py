"""Compares next-token probabilities with quantized caches and with a 16-bit cache, on the same text."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxinfer import LLM, SamplingParams
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.events import Logits
from mlxinfer.engine.core.sequence import Sequence

FORMATS = ("8", "k8v4", "k6v4", "k5v4", "4", "3", "2")
FIRST16 = "4, first page 16"
SCALE_BITS = 32 / 64
"""Bits of scales per value, for head sizes that are multiples of 64."""
PAGE = 64
COLUMNS = ("model", "context", "engine", "cache", "bits", "tokens", "mean_kl", "high_kl", "highest_kl", "same_top", "perplexity")
_KEY = COLUMNS[:4]

Rows = NDArray[np.float32]
Result = dict[str, str]


def measure(name: str, model: Path, ids: list[int], caches: tuple[str, ...], tell: Callable[[str], None]) -> Iterator[Result]:
    """Measure `caches`, or all if empty. The 16-bit cache runs again for each, because both sets of logits would not fit into memory."""
    for cache in (*FORMATS, FIRST16):
        if caches and cache not in caches:
            continue
        tell(f"{name}, {len(ids)} tokens: {cache}")
        kv = cache.partition(",")[0]
        form = KVFormat.parse(kv)
        bits = sum(each + SCALE_BITS * (each < 16) for each in (form.k_bits, form.v_bits)) / 2
        loss = losses(zip(logits(model, ids, "16"), logits(model, ids, kv, first16=cache == FIRST16), strict=True), ids)
        figures = {"model": name, "context": len(ids), "engine": "mlxinfer", "cache": cache, "bits": bits, **loss}
        yield {key: f"{value:.5g}" if isinstance(value, float) else str(value) for key, value in figures.items()}


def logits(model: Path, ids: list[int], kv: str, *, first16: bool = False) -> Iterator[Rows]:
    """Logits `[rows, vocab]` of all tokens in order, some rows at a time."""
    with LLM(str(model), kv=kv, kv_first16=first16, max_context=len(ids) + 64) as llm:
        llm.engine.add(Sequence(ids, SamplingParams(), seed=0, max_length=len(ids), wants_logits=True))
        while not llm.engine.idle:
            for event in llm.engine.step():
                if isinstance(event, Logits):
                    yield np.array(event.rows)


def losses(pairs: Iterator[tuple[Rows, Rows]], ids: list[int], skip: int = PAGE) -> dict[str, float]:
    """Figures of pairs of exact and other logits `[rows, vocab]` of the tokens `ids`, without the first `skip` positions.

    `mean_kl`, `high_kl` (99th percentile) and `highest_kl` are KL divergences in nats. `same_top` is the share of positions with the same
    most probable token. `perplexity` is the factor by which the text's perplexity grows.
    """
    parts: list[tuple[Rows, NDArray[np.bool_], Rows]] = []
    done = 0
    for exact, other in pairs:
        p, q = log_softmax(exact), log_softmax(other)
        following = ids[done + 1 : done + 1 + len(p)]
        rows = np.arange(len(following))
        parts.append(((np.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1), p[rows, following] - q[rows, following]))
        done += len(p)
    kl, same, surprise = (np.concatenate(each)[skip:] for each in zip(*parts, strict=True))
    return {
        "tokens": len(kl),
        "mean_kl": float(kl.mean()),
        "high_kl": float(np.percentile(kl.astype(np.float64), 99)),
        "highest_kl": float(kl.max()),
        "same_top": float(same.mean()),
        "perplexity": float(np.exp(surprise.mean())),
    }


def log_softmax(logits: Rows) -> Rows:
    shifted = logits - logits.max(-1, keepdims=True)
    sums: NDArray[np.float64] = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    found: Rows = shifted - np.log(sums).astype(np.float32)
    return found


def store(row: Result, path: Path) -> None:
    """Add a row to a file of results. It replaces an earlier row of the same cache, model and length."""
    rows = {tuple(each[key] for key in _KEY): each for each in [*read(path), row]}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(rows: list[Result]) -> str:
    """Markdown: a table for each model and length of text."""
    text = ""
    for model, context in dict.fromkeys((row["model"], row["context"]) for row in rows):
        text += f"\n{model}, {context} tokens\n\n| engine | cache | bits a value | KL, mean | KL, 99 % | same top token | perplexity |\n"
        text += "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        for row in rows:
            if (row["model"], row["context"]) == (model, context):
                kl, high, top, perplexity = (float(row[key]) for key in ("mean_kl", "high_kl", "same_top", "perplexity"))
                cells = (row["engine"], row["cache"], row["bits"], f"{kl:.2g}", f"{high:.2g}", f"{top:.1%}", f"x{perplexity:.3f}")
                text += f"| {' | '.join(cells)} |\n"
    return text.lstrip()
