"""What of one sequence lies outside of sealed pages, copied: the rows of its open page, and its recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from .recurrent import RecurrentStore
from .store import LayerStore

LEAST_BYTES = 4096
"""That an array counts as: allocators round up, and Metal bounds how many buffers there are, not only their bytes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """By layer: keys and values `[Hkv, n, D]` of the tokens in the open page, and the states of recurrent layers."""

    open: dict[int, list[mx.array]]
    states: dict[int, list[mx.array]]

    @property
    def arrays(self) -> list[mx.array]:
        return [a for arrays in (*self.open.values(), *self.states.values()) for a in arrays]

    @property
    def nbytes(self) -> int:
        return sum(max(a.nbytes, LEAST_BYTES) for a in self.arrays)


def take(slot: int, count: int, stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> Rows:
    """Copies of `count` rows, submitted at once: steps after this one write where they came from."""
    rows = Rows(
        {layer: store.open_rows(slot, count) for layer, store in stores.items()} if count else {},
        {layer: store.of(slot) for layer, store in recurrent.items()},
    )
    mx.async_eval(rows.arrays)  # type: ignore[no-untyped-call]
    return rows


def put(rows: Rows, slot: int, count: int, stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> None:
    """Let a slot start with the first `count` of these rows, and the states."""
    for layer, arrays in rows.open.items():
        if count:
            stores[layer].put_open(slot, [a[:, :count] for a in arrays])
    for layer, arrays in rows.states.items():
        recurrent[layer].put(slot, arrays)
