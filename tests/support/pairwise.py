"""Few combinations of many choices, such that any two choices meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Combination = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Combination]:
    """Greedy: of some random combinations that begin with a pair still missing, the one with most missing pairs. Always the same."""
    chance = random.Random(seed)
    names = list(axes)
    sizes = [len(axes[name]) for name in names]
    missing = {(a, i, b, j) for a, b in itertools.combinations(range(len(names)), 2) for i in range(sizes[a]) for j in range(sizes[b])}
    chosen = []
    while missing:
        a, i, b, j = min(missing)
        candidates = [[chance.randrange(size) for size in sizes] for _ in range(40)]
        for c in candidates:
            c[a], c[b] = i, j
        best = max(candidates, key=lambda c: len(missing & _pairs(c)))
        missing -= _pairs(best)
        chosen.append({name: axes[name][k] for name, k in zip(names, best, strict=True)})
    return chosen


def _pairs(combination: list[int]) -> set[tuple[int, int, int, int]]:
    return {(a, i, b, j) for (a, i), (b, j) in itertools.combinations(enumerate(combination), 2)}
