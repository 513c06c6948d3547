"""The rows of a sampling batch: its sequences, their drafts, and their parameters as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..types import NEUTRAL, SamplingParams
from ..util.dataclass import dataclass


class SampledSequence(Protocol):
    """A sequence as the sampler sees it; the engine's `Sequence` is one."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters; fields that are None are neutral."""
        ...

    @property
    def seed(self) -> int:
        """64 bits."""
        ...

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids."""
        ...

    @property
    def answer(self) -> Sequence[int]:
        """Token ids, as far as the host has read them."""
        ...

    @property
    def pending_token(self) -> mx.array | None:
        """uint32 `[n]`: tokens after `answer` that are on the device only."""
        ...


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens proposed for each sequence."""

    counts: Sequence[int]
    """Drafts per sequence."""
    tokens: mx.array
    """uint32 `[sum(counts)]`: concatenated, in the order of the sequences."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """All rows of a step with drafts. Sequence s has `1 + counts[s]` neighbouring rows; row i follows its first i drafts."""

    drafts: Drafts
    sequences: list[int] = field(init=False)
    """`[R]`: sequence of each row."""
    behind: list[int] = field(init=False)
    """`[R]`: drafts that each row follows."""
    plain: list[int] = field(init=False)
    """Rows of sequences without drafts."""

    def __post_init__(self) -> None:
        counts = self.drafts.counts
        object.__setattr__(self, "sequences", [s for s, count in enumerate(counts) for _ in range(count + 1)])
        object.__setattr__(self, "behind", [i for count in counts for i in range(count + 1)])
        starts = np.cumsum([0, *(count + 1 for count in counts)]).tolist()
        object.__setattr__(self, "plain", [start for start, count in zip(starts, counts, strict=False) if not count])

    def part(self, start: int, stop: int) -> PickedRows:
        """Rows `start` to `stop` (excluded)."""
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
    """Some of the sampled rows."""

    sequences: list[int]
    """`[R]`: sequence of each row."""
    drafted: tuple[list[int], mx.array] | None = None
    """(row, token) of each draft that a row follows, as two lists; None without drafts."""

    @property
    def rows(self) -> mx.array:
        """`sequences` on the device."""
        return mx.array(self.sequences)


def values(params: Sequence[SamplingParams], name: str) -> list[float]:
    """A parameter of all rows, neutral where it is None."""
    return [NEUTRAL[name] if (value := getattr(p, name)) is None else value for p in params]


def column(numbers: Sequence[float]) -> mx.array:
    """The numbers as float32 `[R, 1]`."""
    return mx.array(np.array(numbers, dtype=np.float32)[:, None])
