"""The state of one sequence outside of sealed pages: recurrent states, and copies of them and of the open page's rows for snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .base import RecurrentSpec, RecurrentUpdate, Segment
from .store import LayerStore


class RecurrentStore:
    """The states of one layer, each `[slots, *shape]` in float32."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.states = [mx.zeros((0, *shape), mx.float32) for shape in spec.shapes]

    @property
    def arrays(self) -> list[mx.array]:
        return self.states

    def grow(self, slots: int) -> None:
        """Make room for at least this many slots; never shrinks."""
        for i, state in enumerate(self.states):
            missing = slots - state.shape[0]
            if missing > 0:
                self.states[i] = mx.concatenate([state, mx.zeros((missing, *state.shape[1:]), state.dtype)])

    def reset(self, slot: int) -> None:
        """Set a slot's states to zero."""
        for i, state in enumerate(self.states):
            state[slot] = 0
            self.states[i] = state

    def copy(self, source: int, target: int) -> None:
        for state in self.states:
            state[target] = state[source]

    def of(self, slot: int) -> list[mx.array]:
        """Copies of one sequence's states, each `[1, *shape]`."""
        return [mx.take(state, mx.array([slot]), axis=0) for state in self.states]

    def put(self, slot: int, states: Sequence[mx.array]) -> None:
        """Store what `of` returned."""
        for state, kept in zip(self.states, states, strict=True):
            state[mx.array([slot])] = kept

    def run(self, segments: tuple[Segment, ...], inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Advance the segments' states over their rows of `inputs` `[T, C]`, segments of equal length together. Returns `[T, D]`."""
        outputs: dict[int, mx.array] = {}
        for group in _by_length(segments):
            rows = _rows(inputs, group)
            slots = mx.array([s.slot for s in group])
            y, states = update(rows, tuple(state[slots] for state in self.states))
            for state, new in zip(self.states, states, strict=True):
                state[slots] = new.astype(state.dtype)
            for i, segment in enumerate(group):
                outputs[segment.start] = y[i]
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return mx.concatenate([outputs[s.start] for s in segments])


def _by_length(segments: tuple[Segment, ...]) -> list[list[Segment]]:
    groups: dict[int, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.count, []).append(segment)
    return list(groups.values())


def _rows(inputs: mx.array, group: list[Segment]) -> mx.array:
    """The rows of segments of one length, `[B, L, C]`."""
    return mx.stack([inputs[s.start : s.start + s.count] for s in group])


LEAST_BYTES = 4096
"""Bytes that an array counts at least: allocators round up, and Metal limits the number of buffers as well as their bytes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The content of a snapshot, by layer."""

    open: dict[int, list[mx.array]]
    """Keys and values `[Hkv, n, D]` of the n tokens in the open page."""
    states: dict[int, list[mx.array]]
    """States of recurrent layers, each `[1, *shape]`, float32."""

    @property
    def arrays(self) -> list[mx.array]:
        return [a for arrays in (*self.open.values(), *self.states.values()) for a in arrays]

    @property
    def nbytes(self) -> int:
        """Bytes, with each array counted as `LEAST_BYTES` at least."""
        return sum(max(a.nbytes, LEAST_BYTES) for a in self.arrays)


def take_rows(slot: int, count: int, stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> Rows:
    """Copies of a slot's first `count` open rows and of its states, submitted at once because later steps overwrite the originals."""
    rows = Rows(
        {layer: store.open_rows(slot, count) for layer, store in stores.items()} if count else {},
        {layer: store.of(slot) for layer, store in recurrent.items()},
    )
    mx.async_eval(rows.arrays)  # type: ignore[no-untyped-call]
    return rows


def put_rows(rows: Rows, slot: int, count: int, stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> None:
    """Start a slot with the first `count` of these rows, and with the states."""
    for layer, arrays in rows.open.items():
        if count:
            stores[layer].put_open(slot, [a[:, :count] for a in arrays])
    for layer, arrays in rows.states.items():
        recurrent[layer].put(slot, arrays)
