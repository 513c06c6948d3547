"""Importance of each input of a matrix: its mean square while the model reads a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ...loading.checkpoint import Checkpoint
from ...loading.weights import Progress
from ...models.blockwise import batches
from ..write.journal import Journal, JournalBookmarks
from .blockwise import InputRecorder, read_through

Importance = dict[str, mx.array]
"""By the tensor's name in the graph: float32 `[in]`, or `[experts, in]`."""

_EXPERT_FLOOR = 0.1
"""Weight of all experts' mean square in each expert's own, because some experts see few tokens."""


TOKENS = 4_096
"""Random tokens to read (`texts.random_ids`)."""
BATCH = 1024
"""Tokens that pass a block at once. The block's activations for all of them are in memory."""


def measure(
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    progress: Progress | None = None,
    journal: Journal | None = None,
    batch: int = BATCH,
) -> Importance:
    """Return the mean square of every matrix input while the model reads these texts (token ids), about `batch` tokens at once.

    Memory, progress and errors are those of `read_through`. With a `journal`, an interrupted run resumes at its block, and a finished one
    returns its result.
    """
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
    """A `Watcher` that collects mean squares."""

    def __init__(self) -> None:
        self.found: Importance = {}

    def recorder(self, names: list[str]) -> Moments:
        return Moments()

    def finish(self, places: list[tuple[list[str], InputRecorder]]) -> None:
        for names, place in places:
            assert isinstance(place, Moments)
            mean = place.mean()
            if mean is not None:
                mx.eval(mean)
                self.found.update((name, mean) for name in names)


@dataclass(slots=True)
class Moments:
    """Sums over the tokens at one place."""

    squares: mx.array | None = None
    """float32 `[in]`, or `[experts, in]`."""
    count: mx.array = field(default_factory=lambda: mx.zeros(1))
    """Tokens `[1]`, or `[experts, 1]`."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool = False) -> None:
        rows = mx.square(x.astype(mx.float32))
        if experts is None:
            rows = rows.reshape(-1, x.shape[-1])
            self.squares, self.count = _added(self.squares, rows.sum(0)), self.count + rows.shape[0]
        else:
            rows = mx.broadcast_to(rows.squeeze(-2), (*experts.shape, x.shape[-1])).reshape(-1, x.shape[-1])
            chosen = experts.flatten()
            self.squares = _added(self.squares, mx.zeros((expert_count, x.shape[-1])).at[chosen].add(rows))
            self.count = self.count + mx.zeros((expert_count, 1)).at[chosen].add(mx.ones((chosen.size, 1)))
        mx.eval(self.squares, self.count)

    def mean(self) -> mx.array | None:
        if self.squares is None or self.squares.ndim == 1:
            return self.squares if self.squares is None else self.squares / self.count
        overall = self.squares.sum(0) / mx.maximum(self.count.sum(), 1)
        floor = _EXPERT_FLOOR * mx.maximum(self.count.sum() / self.count.size, 1)
        return (self.squares + floor * overall) / (self.count + floor)


def _added(before: mx.array | None, more: mx.array) -> mx.array:
    return more if before is None else before + more
