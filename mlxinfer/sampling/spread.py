"""Rows of a step in which some sequences have drafts to be verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens proposed for each sequence: `counts[s]` of them for sequence s, one sequence's after another's in `tokens` `[sum]`."""

    counts: Sequence[int]
    tokens: mx.array


@dataclass(frozen=True, slots=True)
class Spread:
    """Sequence s has `1 + counts[s]` rows, one after another: the first behind what is known, each further one behind one more draft."""

    drafts: Drafts
    sequences: list[int] = field(init=False)
    """`[R]`: whose row it is."""
    behind: list[int] = field(init=False)
    """`[R]`: drafts that the row stands behind."""
    plain: list[int] = field(init=False)
    """Rows of sequences without drafts."""

    def __post_init__(self) -> None:
        counts = self.drafts.counts
        object.__setattr__(self, "sequences", [s for s, count in enumerate(counts) for _ in range(count + 1)])
        object.__setattr__(self, "behind", [i for count in counts for i in range(count + 1)])
        starts = np.cumsum([0, *(count + 1 for count in counts)]).tolist()
        object.__setattr__(self, "plain", [start for start, count in zip(starts, counts, strict=False) if not count])

    @property
    def rows(self) -> mx.array:
        """`sequences` on the device."""
        return mx.array(self.sequences)

    def said(self) -> tuple[mx.array, mx.array]:
        """`(row, token)` pairs: the drafts that each row stands behind."""
        rows: list[int] = []
        places: list[int] = []
        row = first = 0
        for count in self.drafts.counts:
            for behind in range(count + 1):
                rows += [row] * behind
                places += range(first, first + behind)
                row += 1
            first += count
        return mx.array(rows), self.drafts.tokens[mx.array(places)]
