"""How much each input of a matrix counts: its mean square while the model reads a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...loading.checkpoint import Checkpoint
from ...loading.weights import Progress
from ...models import architecture
from ...models.blockwise import batches
from ..write.journal import Journal, JournalBookmarks
from .blockwise import Place, read_through

Importance = dict[str, mx.array]
"""By the tensor's name in the graph: float32 `[in]`, or `[experts, in]`."""

_EXPERT_FLOOR = 0.1
"""Least share that all experts' mean square has in that of one: some see few tokens, or none."""


_TEXTS, _TOKENS = 8, 512
"""How many random texts are read, and tokens of each."""
TOKENS = _TEXTS * _TOKENS
"""Tokens in all random texts."""
BATCH = 1024
"""Tokens that go through a block of layers at once: a few texts, as it is in memory for all of them."""


def random_texts(config: dict[str, Any]) -> list[list[int]]:
    """Token ids, always the same for a size of vocabulary. They serve almost as well as real text: what a matrix's inputs are scaled by
    depends on the model more than on what it reads."""
    vocab = architecture(config).sizes.vocab
    ids = np.random.default_rng(0).integers(0, vocab, (_TEXTS, _TOKENS))
    return cast("list[list[int]]", ids.tolist())


def measure(
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    progress: Progress | None = None,
    journal: Journal | None = None,
    batch: int = BATCH,
) -> Importance:
    """The mean squares of the inputs of every matrix, while the model reads these texts (token ids), each from its beginning, about `batch`
    tokens at once; memory, progress and errors as of `read_through`. With a `journal`, an interrupted reading goes on at its block, and
    what was measured before is returned."""
    if journal and (kept := journal.load(_UNIT)):
        return kept[0]
    moments = _EveryMoments()
    bookmarks = JournalBookmarks(journal, "weighed", moments.found) if journal else None
    read_through(checkpoint, batches(texts, size=batch), moments, progress, bookmarks)
    if journal and bookmarks:
        journal.save(_UNIT, moments.found)
        bookmarks.forget()
    return moments.found


_UNIT = "importance"


class _EveryMoments:
    """A `Watcher` that keeps the mean squares."""

    def __init__(self) -> None:
        self.found: Importance = {}

    def place(self, names: list[str]) -> Moments:
        return Moments()

    def done(self, places: list[tuple[list[str], Place]]) -> None:
        for names, place in places:
            assert isinstance(place, Moments)
            mean = place.mean()
            if mean is not None:
                mx.eval(mean)
                self.found.update((name, mean) for name in names)


@dataclass(slots=True)
class Moments:
    """Sums over the tokens that came to one place."""

    squares: mx.array | None = None
    """float32 `[in]`, or `[experts, in]`."""
    count: mx.array = field(default_factory=lambda: mx.zeros(1))
    """Tokens `[1]`, or `[experts, 1]`."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool = False) -> None:
        rows = mx.square(x.astype(mx.float32))
        if experts is None:
            rows = rows.reshape(-1, x.shape[-1])
            self.squares, self.count = _sum(self.squares, rows.sum(0)), self.count + rows.shape[0]
        else:
            rows = mx.broadcast_to(rows.squeeze(-2), (*experts.shape, x.shape[-1])).reshape(-1, x.shape[-1])
            chosen = experts.flatten()
            self.squares = _sum(self.squares, mx.zeros((expert_count, x.shape[-1])).at[chosen].add(rows))
            self.count = self.count + mx.zeros((expert_count, 1)).at[chosen].add(mx.ones((chosen.size, 1)))
        mx.eval(self.squares, self.count)

    def mean(self) -> mx.array | None:
        if self.squares is None or self.squares.ndim == 1:
            return self.squares if self.squares is None else self.squares / self.count
        overall = self.squares.sum(0) / mx.maximum(self.count.sum(), 1)
        floor = _EXPERT_FLOOR * mx.maximum(self.count.sum() / self.count.size, 1)
        return (self.squares + floor * overall) / (self.count + floor)


def _sum(before: mx.array | None, more: mx.array) -> mx.array:
    return more if before is None else before + more
