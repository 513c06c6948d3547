"""What is sampled for: the sequences, their drafts, and their settings as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import mlx.core as mx
import numpy as np

from ..types import NEUTRAL, SamplingParams
from ..util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to sample for."""

    params: SamplingParams
    """How to choose its tokens; fields that were left out are neutral."""
    seed: int
    """64 bits."""
    prompt: Sequence[int]
    """Token ids."""
    answer: Sequence[int]
    """Token ids, as far as the host has read them."""
    pending_token: mx.array | None = None
    """uint32 `[n]`: tokens after those, which are on the device only."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens proposed for each sequence."""

    counts: Sequence[int]
    """How many for each sequence."""
    tokens: mx.array
    """uint32 `[sum(counts)]`: one sequence's after another's."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Sequence s has `1 + counts[s]` rows, one after another: the first after what is known, each further one after one more draft."""

    drafts: Drafts
    """What is verified."""
    sequences: list[int] = field(init=False)
    """`[R]`: whose row it is."""
    behind: list[int] = field(init=False)
    """`[R]`: drafts that the row stands after."""
    plain: list[int] = field(init=False)
    """Rows of sequences without drafts."""

    def __post_init__(self) -> None:
        counts = self.drafts.counts
        object.__setattr__(self, "sequences", [s for s, count in enumerate(counts) for _ in range(count + 1)])
        object.__setattr__(self, "behind", [i for count in counts for i in range(count + 1)])
        starts = np.cumsum([0, *(count + 1 for count in counts)]).tolist()
        object.__setattr__(self, "plain", [start for start, count in zip(starts, counts, strict=False) if not count])

    def part(self, start: int, stop: int) -> PickedRows:
        """Rows `start` to `stop`."""
        rows: list[int] = []
        places: list[int] = []
        row = first = 0
        for count in self.drafts.counts:
            for behind in range(count + 1):
                if start <= row < stop:
                    rows += [row - start] * behind
                    places += range(first, first + behind)
                row += 1
            first += count
        return PickedRows(self.sequences[start:stop], (rows, self.drafts.tokens[mx.array(places)]) if rows else None)


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Some of the rows that are sampled."""

    sequences: list[int]
    """`[R]`: whose row it is."""
    drafted: tuple[list[int], mx.array] | None = None
    """The drafts that rows stand after: a row, and a token, for each; None if there are none."""

    @property
    def rows(self) -> mx.array:
        """`sequences` on the device."""
        return mx.array(self.sequences)


def values(params: Sequence[SamplingParams], name: str) -> list[float]:
    """A field of all rows, neutral where it was left out."""
    return [NEUTRAL[name] if (value := getattr(p, name)) is None else value for p in params]


def column(numbers: Sequence[float]) -> mx.array:
    """float32 `[R, 1]`."""
    return mx.array(np.array(numbers, dtype=np.float32)[:, None])
