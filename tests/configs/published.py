"""Configs as their publishers wrote them, with what must become of each.

`published.jsonl` has a line for each: `id` (the hub's, or the architecture and its size), `origin`, `config`. Long lists of module names in
quantization blocks are cut, and the factors of longrope are rounded.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "published.jsonl"

NO_GRAPH = {
    "deepseek_ref": "the reference form of DeepSeek V4, which neither mlx-lm nor transformers has",
    "deepseek_v4": "neither a graph here nor one of mlx-lm",
    "minimax_m3": "neither a graph here nor one of mlx-lm",
    "step3p7": "neither a graph here nor one of mlx-lm",
}
"""By `model_type`: why all of its configs are refused."""

REFUSED: dict[str, str] = {}
"""By `id`: the key for which a config with a graph here is refused, and why that is right."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """The configs by `id`."""
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row["config"] for row in rows}
