"""Stages of a model on several machines: pipeline stages of blocks, or shards of all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx

from ..cache.base import AttentionSpec, Elsewhere, LayerSpec, RecurrentSpec, Step
from ..nn.packing import objects
from ..util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks of a model, or a shard of all blocks."""

    first: int
    """Index of the first block."""
    last: int
    """Index after the last block."""
    share: int = 0
    """Rank of the shard, if every machine has a shard of all blocks."""
    shares: int = 1
    """Number of shards; 1 for whole blocks."""


class NextStages(Protocol):
    """Blocks after those of this process."""

    def __call__(self, x: mx.array, step: Step, inputs: mx.array | None, adapters: Sequence[tuple[int, int]] = ()) -> mx.array:
        """Run rows `[T, hidden]` and per-layer `inputs` through the remaining blocks.

        Returns rows `[T, hidden]`, valid where the step's segments request them (`Segment.read`), with the rows at `BlockStack.taps` beside
        them. `adapters` are (place from 1, number of rows).
        """
        ...


def layers_of(blocks: Sequence[object]) -> set[int]:
    """Return the cache layers that these blocks write or read."""
    found = {getattr(node, "layer", None) for node in objects(list(blocks))}
    return {layer for layer in found if isinstance(layer, int) and layer >= 0}


def only(specs: Sequence[LayerSpec], own: set[int]) -> tuple[LayerSpec, ...]:
    """Return the specs with layers outside of `own` marked as another machine's."""
    return tuple(spec if layer in own else Elsewhere(cast("AttentionSpec | RecurrentSpec", spec)) for layer, spec in enumerate(specs))


def side_by_side(rows: mx.array, width: int) -> list[mx.array]:
    """Split `[T, n * width]` into n arrays `[T, width]`."""
    return [rows[:, at : at + width] for at in range(0, rows.shape[1], width)] if rows.shape[1] > width else [rows]
