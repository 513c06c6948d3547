"""The blocks of a model without what comes before and after them, all of them or a part: the rest may be on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx

from ..cache.base import AttentionSpec, Elsewhere, LayerSpec, RecurrentSpec, Step
from ..nn.packing import objects
from ..util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive blocks of a model."""

    first: int
    """The first of them."""
    last: int
    """The first block that is no longer among them."""
    share: int = 0
    """Where every machine has a share of all blocks: which of them this is."""
    shares: int = 1
    """How many shares there are; with 1, blocks are whole."""


class Rest(Protocol):
    """The blocks after those of this process."""

    def __call__(self, x: mx.array, step: Step, inputs: mx.array | None, adapters: Sequence[tuple[int, int]] = ()) -> mx.array:
        """Rows `[T, hidden]` and the inputs of all blocks to rows `[T, hidden]`, of which those are right that the step's segments ask for
        (`Segment.read`), and beside them those that enter some of these blocks (`BlockStack.taps`). `adapters` are the places of adapters,
        from 1, and how many rows each is for."""
        ...


def layers_of(blocks: Sequence[object]) -> set[int]:
    """The cache's layers that these blocks write or read."""
    found = {getattr(node, "layer", None) for node in objects(list(blocks))}
    return {layer for layer in found if isinstance(layer, int) and layer >= 0}


def only(specs: Sequence[LayerSpec], own: set[int]) -> tuple[LayerSpec, ...]:
    """The same layers, those that are not among `own` marked as another machine's."""
    return tuple(spec if layer in own else Elsewhere(cast("AttentionSpec | RecurrentSpec", spec)) for layer, spec in enumerate(specs))


def side_by_side(rows: mx.array, width: int) -> list[mx.array]:
    """`[T, n * width]` as n times `[T, width]`."""
    return [rows[:, at : at + width] for at in range(0, rows.shape[1], width)] if rows.shape[1] > width else [rows]
