"""What rounding activations costs: how far the next token's probabilities move from those of float32 activations.

The CPU kernels multiply quantized matrices by activations of 15 or 8 bits (`MLXINFER_CPU_PRECISION`). This compares both with
float32 on pages of text, for a GGUF file or a directory.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mlxinfer import LLM, kernels_cpu

from .loss import Comparison, Loss, Rows
from .prose import TEXT

PAGE_TOKENS = 384
ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/architecture.md", "LICENSE")
"""Documents whose beginnings are read, in addition to a short text of several kinds."""


def losses(model: Path) -> dict[str, Loss]:
    """The loss of every precision except float32, by its name. Raises `RuntimeError` without CPU kernels."""
    if not kernels_cpu.in_use():
        raise RuntimeError(kernels_cpu.status())
    exact = _logits(model, "float32")
    found = {}
    for precision in ("int16", "int8"):
        comparison = Comparison()
        for (ids, p), (_, q) in zip(exact, _logits(model, precision), strict=True):
            comparison.add(p, q, ids[1:])
        found[precision] = comparison.loss()
    return found


def table(found: dict[str, dict[str, Loss]]) -> str:
    """Markdown."""
    lines = ["| model | activations | KL, mean | KL, highest | same top token | positions |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for model, rows in found.items():
        for precision, r in rows.items():
            lines.append(f"| {model} | {precision} | {r.mean_kl:.1e} | {r.highest_kl:.1e} | {r.same_top:.1%} | {r.tokens} |")
    return "\n".join(lines) + "\n"


def _logits(model: Path, precision: str) -> list[tuple[list[int], Rows]]:
    """The tokens of each page, and their logits `[tokens, vocab]`."""
    os.environ["MLXINFER_CPU_PRECISION"] = precision
    texts = [TEXT, *((ROOT / name).read_text(encoding="utf-8") for name in PAGES)]
    with LLM(str(model)) as llm:
        pages = [llm.tokenizer.encode(text)[:PAGE_TOKENS] for text in texts]
        return [(ids, np.array(llm.logits(ids))) for ids in pages]
