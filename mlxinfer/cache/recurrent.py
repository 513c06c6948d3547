"""States of recurrent layers: arrays of fixed size, one row per running sequence."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .base import RecurrentSpec, RecurrentUpdate, Segment


class RecurrentStore:
    """The states of one layer, each `[slots, *shape]` in float32."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.states = [mx.zeros((0, *shape), mx.float32) for shape in spec.shapes]

    @property
    def arrays(self) -> list[mx.array]:
        return self.states

    def grow(self, slots: int) -> None:
        for i, state in enumerate(self.states):
            missing = slots - state.shape[0]
            if missing > 0:
                self.states[i] = mx.concatenate([state, mx.zeros((missing, *state.shape[1:]), state.dtype)])

    def reset(self, slot: int) -> None:
        for i, state in enumerate(self.states):
            state[slot] = 0
            self.states[i] = state

    def copy(self, source: int, target: int) -> None:
        for state in self.states:
            state[target] = state[source]

    def of(self, slot: int) -> list[mx.array]:
        """Copies of one sequence's states."""
        return [mx.take(state, mx.array([slot]), axis=0) for state in self.states]

    def put(self, slot: int, states: Sequence[mx.array]) -> None:
        """What `of` gave."""
        for state, kept in zip(self.states, states, strict=True):
            state[mx.array([slot])] = kept

    def run(self, segments: tuple[Segment, ...], inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Advance the segments' states over their rows of `inputs` `[T, C]`, equal lengths together. Returns `[T, D]`."""
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
