"""State of a sequence outside of sealed pages: recurrent states, and snapshots of states and open rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import mlx.core as mx

from ..util.dataclass import dataclass
from .base import Elsewhere, LayerSpec, RecurrentSpec, RecurrentUpdate, Segment
from .store import LayerStore


class RecurrentStore:
    """States of one layer, float32.

    Sequences that advanced together share one array `[B, *shape]` in that order. While they stay together, a step reads and replaces this
    array without gather and scatter.
    """

    def __init__(self, spec: RecurrentSpec) -> None:
        self.shapes = spec.shapes
        self._together: dict[int, _Together] = {}
        """Shared arrays by slot."""
        self._tried: dict[int, _Tried] = {}
        """State before drafts by slot, for rollback."""

    @property
    def arrays(self) -> list[mx.array]:
        return [a for together in dict.fromkeys(self._together.values()) for a in together.states]

    def reset(self, slot: int) -> None:
        """Set a slot's states to zero."""
        self.put(slot, [mx.zeros((1, *shape), mx.float32) for shape in self.shapes])

    def release(self, slot: int) -> None:
        """Drop a slot's states."""
        self._tried.pop(slot, None)
        old = self._together.pop(slot, None)
        if old is not None:
            old.leave(slot)

    def copy(self, source: int, target: int) -> None:
        self.put(target, self.of(source))

    def of(self, slot: int) -> list[mx.array]:
        """Return copies of one sequence's states, each `[1, *shape]`."""
        together = self._together[slot]
        return [mx.take(state, mx.array([together.slots.index(slot)]), axis=0) for state in together.states]

    def put(self, slot: int, states: Sequence[mx.array]) -> None:
        """Store states returned by `of`."""
        self._leave([slot])
        self._together[slot] = _Together([slot], list(states))

    def run(self, segments: tuple[Segment, ...], inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Advance the segments' states over their rows of `inputs` `[T, C]`, segments of equal length together. Returns `[T, D]`."""
        groups = _by_length(segments)
        outputs: dict[int, mx.array] = {}
        for group in groups:
            together, x = self._gather_states([s.slot for s in group]), _rows(inputs, group)
            for i, segment in enumerate(group):
                if segment.drafts:
                    before = [state[i : i + 1] for state in together.states]
                    self._tried[segment.slot] = _Tried(update, x[i : i + 1], before)
            y, states = update(x, tuple(together.states))
            together.states = [new.astype(mx.float32) for new in states]
            if len(groups) == 1:
                return mx.flatten(y, 0, 1)
            for i, segment in enumerate(group):
                outputs[segment.start] = y[i]
        return mx.concatenate([outputs[s.start] for s in segments])

    def verified(self, slot: int, rows: int) -> None:
        """Accept the first `rows` rows of the slot's last segment with drafts.

        If some are rejected, the states are computed again from the layer's recorded inputs, without the rest of the model.
        """
        tried = self._tried.pop(slot, None)
        if tried is not None and rows < tried.inputs.shape[1]:
            _, states = tried.update(tried.inputs[:, :rows], tuple(tried.states))
            self.put(slot, [state.astype(mx.float32) for state in states])

    def together(self, slots: Sequence[int]) -> list[mx.array] | None:
        """Return the states of these slots, each `[B, *shape]`, if they share an array in this order; otherwise None."""
        together = self._together.get(slots[0])
        return together.states if together is not None and together.slots == list(slots) else None

    def join(self, slots: Sequence[int]) -> list[mx.array]:
        """Join and return the states of these slots, each `[B, *shape]`."""
        return self._gather_states(list(slots)).states

    def advance(self, slots: Sequence[int], states: list[mx.array]) -> None:
        """Replace states returned by `together` or `join`."""
        self._together[slots[0]].states = states

    def _gather_states(self, slots: list[int]) -> _Together:
        """Return the states of these slots in one array."""
        together = self._together[slots[0]]
        if together.slots != slots:
            parts = [self._together[slot].of(slot) for slot in slots]
            states = parts[0] if len(parts) == 1 else [mx.concatenate(list(part)) for part in zip(*parts, strict=True)]
            self._leave(slots)
            together = _Together(list(slots), states)
            self._together.update(dict.fromkeys(slots, together))
        return together

    def _leave(self, slots: Sequence[int]) -> None:
        """Remove these slots from their arrays; the rest is copied, so that it does not keep the whole array alive."""
        old = {slot: self._together.pop(slot) for slot in slots if slot in self._together}
        for slot, together in old.items():
            together.leave(slot)
        for together in dict.fromkeys(old.values()):
            left = [slot for slot in together.slots if slot is not None]
            if left:
                rows = mx.array([together.slots.index(slot) for slot in left])
                together.states = [mx.take(state, rows, axis=0) for state in together.states]
                together.slots = list(left)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A layer's inputs of one sequence in a step with drafts."""

    update: RecurrentUpdate
    """Function that advances the states."""
    inputs: mx.array
    """Inputs `[1, L, C]`."""
    states: list[mx.array]
    """States before the inputs, each `[1, *shape]`."""


@dataclass(slots=True, eq=False)
class _Together:
    """States of sequences that advanced together."""

    slots: list[int | None]
    """Slots in order; None for a removed sequence."""
    states: list[mx.array]
    """State arrays, each `[B, *shape]`."""

    def of(self, slot: int) -> list[mx.array]:
        """Return views of one sequence's states, each `[1, *shape]`."""
        at = self.slots.index(slot)
        return self.states if len(self.slots) == 1 else [state[at : at + 1] for state in self.states]

    def leave(self, slot: int) -> None:
        self.slots[self.slots.index(slot)] = None


def _by_length(segments: tuple[Segment, ...]) -> list[list[Segment]]:
    groups: dict[int, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.count, []).append(segment)
    return list(groups.values())


def _rows(inputs: mx.array, group: list[Segment]) -> mx.array:
    """Return the rows of segments of one length, `[B, L, C]`."""
    count, length = len(group), group[0].count
    if count * length == inputs.shape[0]:
        return mx.unflatten(inputs, 0, (count, length))
    return mx.stack([inputs[s.start : s.start + length] for s in group])


LEAST_BYTES = 4096
"""Minimum bytes counted per array, because allocators round up and Metal also limits the number of buffers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Contents of a snapshot by layer."""

    open: dict[int, list[mx.array]]
    """Keys and values `[Hkv, n, D]` of the n tokens in the open page."""
    states: dict[int, list[mx.array]]
    """States of recurrent layers, each `[1, *shape]`, float32."""

    @property
    def arrays(self) -> list[mx.array]:
        return [a for arrays in (*self.open.values(), *self.states.values()) for a in arrays]

    @property
    def nbytes(self) -> int:
        """Bytes, counting at least `LEAST_BYTES` per array."""
        return sum(max(a.nbytes, LEAST_BYTES) for a in self.arrays)


def take_rows(slot: int, count: int, stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> Rows:
    """Copy a slot's first `count` open rows and its states. The copies are submitted at once, as later steps overwrite the originals."""
    rows = Rows(
        {layer: store.open_rows(slot, count) for layer, store in stores.items()} if count else {},
        {layer: store.of(slot) for layer, store in recurrent.items()},
    )
    mx.async_eval(rows.arrays)  # type: ignore[no-untyped-call]
    return rows


def rows_elsewhere(layers: Sequence[LayerSpec], count: int, dtype: mx.Dtype) -> int:
    """Return the bytes of a snapshot with `count` open rows on other machines, counted as in `Rows.nbytes`."""
    total = 0
    for spec in (layer.spec for layer in layers if isinstance(layer, Elsewhere)):
        if isinstance(spec, RecurrentSpec):
            total += sum(max(4 * prod(shape), LEAST_BYTES) for shape in spec.shapes)
        elif count:
            total += sum(max(count * spec.kv_heads * dim * dtype.size, LEAST_BYTES) for dim in (spec.key_dim, spec.value_dim))
    return total


def put_rows(rows: Rows, slot: int, count: int, stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> None:
    """Initialize a slot with the first `count` rows and the states."""
    for layer, arrays in rows.open.items():
        if count:
            stores[layer].put_open(slot, [a[:, :count] for a in arrays])
    for layer, arrays in rows.states.items():
        recurrent[layer].put(slot, arrays)
