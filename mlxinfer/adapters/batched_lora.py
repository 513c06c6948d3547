"""The factors of all adapters for one matrix, stacked, and their products with rows that have different adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import mlx.core as mx

from .. import kernels_cpu
from ..kernels_cpu import Packed
from ..nn.linear import Linear
from ..nn.norms import RMSNorm
from ..nn.weights import numbers
from ..util.dataclass import dataclass
from .places import Changes, Place, factor_dtype, has_gain, packs_factors
from .update import Adapter, Factors, Update

LONG_RUN = 16
"""Rows with one adapter, on average, from which a product for each run of them is faster than a gathered one. Measured on a CPU, with 16
columns between the factors: 4 runs of 4 rows 247 µs against 179, 4 runs of 32 rows 1170 against 1422."""
_ROWS_AT_ONCE = 4096


class Choice:
    """Which adapter each row of the step under construction has. Slot 0 is none."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int]] = []
        """Slot, first row and the row after the last, of neighbours with one adapter."""
        self.slots: frozenset[int] = frozenset()
        self.rows = 0
        self.ids = mx.array([0], mx.uint32)
        """uint32 `[T]`: the slot of each row."""
        self._changed: dict[frozenset[int], mx.array] = {}

    def set(self, rows: Sequence[tuple[int, int]]) -> None:
        """`rows` are slots and how many rows they are for, in order."""
        self.runs, start = [], 0
        for slot, same in groupby(rows, key=lambda each: each[0]):
            stop = start + sum(count for _, count in same)
            self.runs.append((slot, start, stop))
            start = stop
        self.rows, self.slots = start, frozenset(slot for slot, _, _ in self.runs)
        self.ids = mx.array([slot for slot, first, stop in self.runs for _ in range(first, stop)], mx.uint32)
        self._changed.clear()

    @property
    def by_runs(self) -> bool:
        """Whether to compute the runs one by one."""
        return self.rows >= LONG_RUN * len(self.runs)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Slots and how many rows they are for, as `set` takes them."""
        return [(slot, stop - first) for slot, first, stop in self.runs]

    def changed(self, slots: frozenset[int]) -> mx.array:
        """bool `[T, 1]`: the rows that have one of these slots."""
        if slots not in self._changed:  # one for all layers, usually
            self._changed[slots] = mx.array([[slot in slots] for slot, first, stop in self.runs for _ in range(first, stop)])
        return self._changed[slots]


@dataclass(frozen=True, slots=True)
class Stack:
    """The update of one matrix by every adapter. Projections that were joined have their columns next to each other in `a`, and blocks of
    their own in `b`: all are computed by two products."""

    a: mx.array | Packed
    """`[slots, in, R]`, packed `[slots, R, in]`; zeros in slot 0, and where an adapter has no or a smaller update."""
    b: mx.array | Packed
    """`[slots, R, out]`, packed `[slots, out, R]`, times the scale and, with a magnitude, the gain."""
    gain: mx.array | None
    """Factor of the matrix's own product, float32 `[slots, out]`, where an adapter has magnitudes: length wanted over length of the row."""
    offset: mx.array | None
    """What is added to that, float32 `[slots, out]`: the part of the bias that the gain took."""
    changed: frozenset[int]
    """Slots whose adapter changes this matrix."""
    pairs: tuple[tuple[mx.array, mx.array], ...] | tuple[tuple[Packed, Packed], ...]
    """`a` and `b` of each slot, views of the stacks."""
    changes: Changes
    """What it was made for."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = [part.data if isinstance(part, Packed) else part for part in (self.a, self.b, self.gain, self.offset)]
        return sum(part.nbytes for part in parts if part is not None)

    def factors(self, slot: int) -> tuple[mx.array, mx.array]:
        """`a` `[in, R]` and `b` `[R, out]` of one adapter, in float32."""
        a, b = self.pairs[slot]
        if isinstance(a, Packed) and isinstance(b, Packed):
            a, b = (part.rows(mx.arange(part.shape[0]), mx.float32).T for part in (a, b))
        assert isinstance(a, mx.array)
        assert isinstance(b, mx.array)
        return a.astype(mx.float32), b.astype(mx.float32)

    def added(self, y: mx.array | None, x: mx.array, choice: Choice, norm: RMSNorm | None = None) -> mx.array:
        """`y` `[T, out]` and what the adapters add to it for rows `[T, in]`, some of which must have one that changes this matrix; with
        None, that alone. `norm` is applied to packed factors' rows first."""
        if isinstance(self.a, Packed):
            return self._packed(y, x, choice, norm)
        assert isinstance(self.a, mx.array)
        assert isinstance(self.b, mx.array)
        rows = x.astype(self.a.dtype)
        if len(choice.runs) == 1:
            delta = self._run(rows, choice.runs[0][0])
        elif choice.by_runs:
            delta = mx.concatenate([self._run(rows[first:stop], slot) for slot, first, stop in choice.runs])
        else:
            inner = mx.gather_mm(rows[:, None], self.a, rhs_indices=choice.ids)
            delta = mx.gather_mm(inner, self.b, rhs_indices=choice.ids)[:, 0]
        delta = delta.astype(x.dtype)
        return delta if y is None else y + delta

    def _packed(self, y: mx.array | None, x: mx.array, choice: Choice, norm: RMSNorm | None) -> mx.array:
        """By the CPU's products, in which a row's result does not depend on the other rows, and which add to `y` themselves."""
        one = len(choice.slots) == 1
        a, b = self.pairs[choice.runs[0][0]] if one else (self.a, self.b)
        ids = None if one else choice.ids
        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        inner = a.multiply(x, experts=ids) if norm is None else a.multiply(x, experts=ids, norm=norm.weight, eps=norm.eps)
        if y is not None and y.dtype == inner.dtype:
            return b.multiply(inner, experts=ids, residual=y)
        delta = b.multiply(inner, experts=ids).astype(x.dtype)
        return delta if y is None else y + delta

    def _run(self, x: mx.array, slot: int) -> mx.array:
        a, b = self.pairs[slot]
        assert isinstance(a, mx.array)
        assert isinstance(b, mx.array)
        return (x @ a) @ b if slot in self.changed else mx.zeros((x.shape[0], b.shape[1]), x.dtype)

    def rescaled(self, y: mx.array, choice: Choice) -> mx.array:
        """The matrix's own product `[T, out]`, its bias included, with the lengths that the rows' adapters want."""
        if self.gain is None:
            return y
        scaled = y * self.gain[choice.ids]
        return (scaled if self.offset is None else scaled + self.offset[choice.ids]).astype(y.dtype)


def stack(changes: Changes, adapters: Sequence[Adapter], dtype: mx.Dtype, before: Stack | None = None, kept: Sequence[int] = ()) -> Stack:
    """Read the factors for one matrix, for activations in `dtype`; a magnitude needs the matrix itself. Those that an earlier stack has are
    taken from there, as their files may be gone: `kept` are the slots of all adapters in `before`, 0 for new ones. Raises
    `AdapterError`."""
    known = [*(kept or (0,) * len(adapters))]
    slots = [_empty(changes)]
    for adapter, slot in zip(adapters, known, strict=True):
        slots.append(_moved(changes, adapter, before, slot) if slot and before else _slot(changes, adapter.updates))
    a, b = (mx.stack([getattr(slot, name) for slot in slots]).astype(factor_dtype(dtype)) for name in ("a", "b"))
    gain = mx.stack([slot.gain for slot in slots]) if has_gain(changes, adapters) else None
    bias = changes.linear.bias
    offset = None if gain is None or bias is None else (1 - gain) * bias.astype(mx.float32)
    mx.eval([array for array in (a, b, gain, offset) if array is not None])
    changed = frozenset(i for i, adapter in enumerate(adapters, 1) if adapter.updates.keys() & changes.places.keys())
    if packs_factors():
        packed_a, packed_b = (kernels_cpu.pack(_narrowed(part.swapaxes(1, 2))) for part in (a, b))
        return Stack(packed_a, packed_b, gain, offset, changed, _single(packed_a, packed_b), changes)
    pairs = tuple((a[slot], b[slot]) for slot in range(len(slots)))
    mx.eval(pairs)
    return Stack(a, b, gain, offset, changed, pairs, changes)


def _narrowed(factors: mx.array) -> mx.array:
    """The same numbers in 16 bits, if that loses nothing: a step reads half as much then. Most files were written in 16 bits."""
    if factors.dtype == mx.float32:
        for dtype in (mx.bfloat16, mx.float16):
            narrow = factors.astype(dtype)
            if mx.array_equal(narrow.astype(mx.float32), factors).item():
                return narrow
    return factors


def _single(a: Packed, b: Packed) -> tuple[tuple[Packed, Packed], ...]:
    """The factors of each slot, views of the stacks."""
    parts = [tuple(replace(part, data=part.data[slot]) for part in (a, b)) for slot in range(a.data.shape[0])]
    mx.eval([part.data for pair in parts for part in pair])
    return tuple((first, second) for first, second in parts)


@dataclass(slots=True)
class _Slot:
    """One adapter's part of a `Stack`, in float32."""

    a: mx.array
    b: mx.array
    gain: mx.array


def _empty(changes: Changes) -> _Slot:
    out, into = changes.shape
    return _Slot(mx.zeros((into, changes.rank)), mx.zeros((changes.rank, out)), mx.ones(out))


def _slot(changes: Changes, updates: Mapping[str, Update]) -> _Slot:
    slot, column = _empty(changes), 0
    for key, place in changes.places.items():
        update = updates.get(key)
        if update is not None:
            factors = ordered(update.read(), place)
            gain = row_gain(changes.linear, place, update, factors)
            rows, columns = slice(place.first, place.first + place.rows), slice(column, column + update.rank)
            slot.a[:, columns] = factors.a.T
            slot.b[columns, rows] = (update.scale * factors.b * gain[:, None]).T
            slot.gain[rows] = gain
        column += changes.ranks[key]
    mx.eval(slot.a, slot.b, slot.gain)
    return slot


def _moved(changes: Changes, adapter: Adapter, before: Stack, number: int) -> _Slot:
    """A slot of an earlier stack, in which other projections may have been changed, and by other ranks."""
    slot, (a, b), column = _empty(changes), before.factors(number), 0
    for key in changes.places:
        update = adapter.updates.get(key)
        if update is not None:
            first = before.changes.column(key)
            old, new = slice(first, first + update.rank), slice(column, column + update.rank)
            slot.a[:, new], slot.b[new] = a[:, old], b[old]
        column += changes.ranks[key]
    if before.gain is not None:
        slot.gain = before.gain[number]
    mx.eval(slot.a, slot.b, slot.gain)
    return slot


def ordered(factors: Factors, place: Place) -> Factors:
    """The same with the rows of `b` in the order that the graph's matrix has."""
    if place.order is None:
        return factors
    order = mx.array(place.order)
    return Factors(factors.a, factors.b[order], None if factors.magnitude is None else factors.magnitude[order])


def row_gain(linear: Linear, place: Place, update: Update, factors: Factors) -> mx.array:
    """float32 `[rows]`: the magnitude over the length of each row of the changed matrix; ones without a magnitude."""
    if factors.magnitude is None:
        return mx.ones(place.rows)
    parts = []
    for first in range(0, place.rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, place.rows)
        matrix = _rows(linear, place.first + first, place.first + last)
        changed = matrix + update.scale * (factors.b[first:last] @ factors.a)
        parts.append(mx.linalg.norm(changed, axis=1))
        mx.eval(parts[-1])
    return factors.magnitude / mx.concatenate(parts)


def _rows(linear: Linear, first: int, last: int) -> mx.array:
    """Rows of a matrix in float32."""
    matrix = linear.matrix
    if isinstance(matrix, Packed):
        return matrix.rows(mx.arange(first, last), mx.float32)
    return numbers(matrix)[first:last]
