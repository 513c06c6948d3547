"""What rounding activations costs: how far the next token's probabilities move from those of float32 activations.

The CPU kernels multiply quantized matrices with activations of 15 or 8 bits (`MLXINFER_CPU_PRECISION`). This compares both with
float32 on pages of text, from a GGUF file or a directory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxinfer import LLM, kernels_cpu
from mlxinfer.convert.quality import TEXT

PAGE_TOKENS = 384
ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/architecture.md", "LICENSE")
"""Whose beginnings are read, beside a short text of several kinds."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean and highest KL divergence in nats, and how often the most probable token is the same, over `tokens` positions."""

    precision: str
    mean_kl: float
    highest_kl: float
    same_top: float
    tokens: int


def losses(model: Path) -> list[Loss]:
    """Of every precision but float32. Raises `RuntimeError` without CPU kernels."""
    if not kernels_cpu.in_use():
        raise RuntimeError(kernels_cpu.status())
    exact = _log_probabilities(model, "float32")
    found = []
    for precision in ("int16", "int8"):
        kl, same = [], []
        for p, q in zip(exact, _log_probabilities(model, precision), strict=True):
            kl.append((np.exp(p) * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
        values = np.concatenate(kl)
        found.append(Loss(precision, float(values.mean()), float(values.max()), float(np.concatenate(same).mean()), len(values)))
    return found


def table(found: dict[str, list[Loss]]) -> str:
    """Markdown."""
    lines = ["| model | activations | KL, mean | KL, highest | same top token | positions |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for model, rows in found.items():
        for r in rows:
            lines.append(f"| {model} | {r.precision} | {r.mean_kl:.1e} | {r.highest_kl:.1e} | {r.same_top:.1%} | {r.tokens} |")
    return "\n".join(lines) + "\n"


def _log_probabilities(model: Path, precision: str) -> list[NDArray[np.float32]]:
    """`[tokens, vocab]` of each page."""
    os.environ["MLXINFER_CPU_PRECISION"] = precision
    texts = [TEXT, *((ROOT / name).read_text(encoding="utf-8") for name in PAGES)]
    with LLM(str(model)) as llm:
        found = []
        for text in texts:
            logits = llm.logits(llm.tokenizer.encode(text)[:PAGE_TOKENS])
            found.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    return found
