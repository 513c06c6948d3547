"""Measured hit rates of models whose experts do not all fit in memory, kept for later plans."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from ...expert_offload import OffloadStats, experts_path

_SUFFIX = ".hits"
_LEAST_CHOICES = 2000
"""Fewer choices of experts say little about a model."""


def keep_repeated_share(model: Path, stats: OffloadStats) -> None:
    """Keep what the hits of a closed model say about its routing, unless they are few. Nothing is kept if the folder does not allow it."""
    resident = stats.slots / max(stats.experts, 1)
    if stats.hits + stats.misses < _LEAST_CHOICES or resident >= 1:
        return
    repeated = max((stats.hit_rate - resident) / (1 - resident), 0.0)
    file = _file(model)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        unfinished.write_text(json.dumps({"repeated": repeated, "choices": stats.hits + stats.misses}) + "\n", encoding="utf-8")
        unfinished.replace(file)


def repeated_share(model: Path) -> float | None:
    """Return the share of a token's experts that are in memory because of earlier tokens, as measured last; None if unknown.

    The others are in memory with the probability that a slot is theirs.
    """
    try:
        value = json.loads(_file(model).read_text(encoding="utf-8"))["repeated"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else None


def _file(model: Path) -> Path:
    return experts_path(model).with_suffix(_SUFFIX)
