"""Few combinations of many choices, such that any two choices meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Combination = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0, candidates: int = 30) -> list[Combination]:
    """Greedy: each candidate begins with a missing pair and takes, axis by axis in random order, the choice that meets most others
    for the first time; the best candidate stays. Always the same."""
    chance = random.Random(seed)
    names = list(axes)
    sizes = [len(axes[name]) for name in names]
    missing = {(a, i, b, j) for a, b in itertools.combinations(range(len(names)), 2) for i in range(sizes[a]) for j in range(sizes[b])}
    chosen = []
    while missing:
        ordered = sorted(missing)
        found = [_candidate(missing, ordered, sizes, chance) for _ in range(candidates)]
        best = max(found, key=lambda c: len(missing & _pairs(c)))
        missing -= _pairs(best)
        chosen.append({name: axes[name][best[k]] for k, name in enumerate(names)})
    return chosen


Pair = tuple[int, int, int, int]


def _candidate(missing: set[Pair], ordered: list[Pair], sizes: list[int], chance: random.Random) -> dict[int, int]:
    a, i, b, j = chance.choice(ordered)
    taken = {a: i, b: j}
    for axis in chance.sample(range(len(sizes)), len(sizes)):
        if axis not in taken:
            choices = chance.sample(range(sizes[axis]), sizes[axis])
            taken[axis] = max(choices, key=lambda k: _meets(missing, taken, axis, k))
    return taken


def _meets(missing: set[Pair], taken: dict[int, int], axis: int, choice: int) -> int:
    """Count the missing pairs that a further choice would cover."""
    return sum(((b, j, axis, choice) if b < axis else (axis, choice, b, j)) in missing for b, j in taken.items())


def _pairs(taken: dict[int, int]) -> set[tuple[int, int, int, int]]:
    return {(a, i, b, j) for (a, i), (b, j) in itertools.combinations(sorted(taken.items()), 2)}
