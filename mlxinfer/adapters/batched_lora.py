"""Batched LoRA (Punica, arXiv:2310.18547): stacked factors per matrix, and projections whose rows have different adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import mlx.core as mx

from .. import kernels_cpu
from ..kernels_cpu import Packed
from ..nn.activations import Gate, gated_again
from ..nn.linear import Linear
from ..nn.norms import RMSNorm
from ..nn.weights import numbers
from ..util.dataclass import dataclass
from .places import AdapterTarget, MatrixChanges, factor_dtype, has_gain, packs_factors
from .update import Adapter, Factors, Update

LONG_RUN = 16
"""Average rows per adapter above which one product per run is faster than a gathered product. Measured on a CPU at rank 16:
4 runs of 4 rows 247 µs against 179, 4 runs of 32 rows 1170 against 1422."""
_ROWS_AT_ONCE = 4096


class AdapterChoice:
    """Adapter of each row in the step under construction; slot 0 means no adapter."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int]] = []
        """(slot, first row, row after the last) of each run of rows with one adapter."""
        self.slots: frozenset[int] = frozenset()
        self.rows = 0
        self.ids = mx.array([0], mx.uint32)
        """Slot of each row, uint32 `[T]`."""
        self._changed: dict[frozenset[int], mx.array] = {}

    def set(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the choice; `rows` are (slot, number of rows) in order."""
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
        """True if one product per run is faster."""
        return self.rows >= LONG_RUN * len(self.runs)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """(slot, number of rows) in order, the argument of `set`."""
        return [(slot, stop - first) for slot, first, stop in self.runs]

    def changed(self, slots: frozenset[int]) -> mx.array:
        """Return a mask of the rows with one of these slots, bool `[T, 1]`."""
        if slots not in self._changed:  # usually equal for all layers
            self._changed[slots] = mx.array([[slot in slots] for slot, first, stop in self.runs for _ in range(first, stop)])
        return self._changed[slots]


@dataclass(frozen=True, slots=True)
class Stack:
    """Updates of one matrix by all adapters, computed by two products.

    Joined projections have adjacent columns in `a` and separate blocks in `b`.
    """

    a: mx.array | Packed
    """`[slots, in, R]`, packed `[slots, R, in]`; zeros in slot 0 and for missing or smaller updates."""
    b: mx.array | Packed
    """`[slots, R, out]`, packed `[slots, out, R]`, with scale and, for magnitudes, gain included."""
    gain: mx.array | None
    """Factor of the base product, float32 `[slots, out]`, for adapters with magnitudes: magnitude over row length."""
    offset: mx.array | None
    """Correction added to the base product, float32 `[slots, out]`, because the gain must not scale the bias."""
    changed: frozenset[int]
    """Slots of adapters that update this matrix."""
    pairs: tuple[tuple[mx.array, mx.array], ...] | tuple[tuple[Packed, Packed], ...]
    """Views (`a`, `b`) of each slot."""
    changes: MatrixChanges
    """MatrixChanges from which the stack was built."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = [part.data if isinstance(part, Packed) else part for part in (self.a, self.b, self.gain, self.offset)]
        return sum(part.nbytes for part in parts if part is not None)

    def factors(self, slot: int) -> tuple[mx.array, mx.array]:
        """Return `a` `[in, R]` and `b` `[R, out]` of one adapter in float32."""
        a, b = self.pairs[slot]
        if isinstance(a, Packed) and isinstance(b, Packed):
            a, b = (part.rows(mx.arange(part.shape[0]), mx.float32).T for part in (a, b))
        assert isinstance(a, mx.array)
        assert isinstance(b, mx.array)
        return a.astype(mx.float32), b.astype(mx.float32)

    def added(self, y: mx.array | None, x: mx.array, choice: AdapterChoice, norm: RMSNorm | None = None) -> mx.array:
        """Return `y` `[T, out]` plus the adapters' updates of rows `[T, in]`, or with None the updates alone.

        At least one row must have an adapter that updates this matrix. With packed factors, `norm` is applied to the rows first.
        """
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

    def _packed(self, y: mx.array | None, x: mx.array, choice: AdapterChoice, norm: RMSNorm | None) -> mx.array:
        """Compute with the CPU kernels, which add to `y` and whose rows are independent of one another."""
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

    def rescaled(self, y: mx.array, choice: AdapterChoice) -> mx.array:
        """Scale the base product `[T, out]`, bias included, to the magnitudes of the rows' adapters."""
        if self.gain is None:
            return y
        scaled = y * self.gain[choice.ids]
        return (scaled if self.offset is None else scaled + self.offset[choice.ids]).astype(y.dtype)


def stack(
    changes: MatrixChanges, adapters: Sequence[Adapter], dtype: mx.Dtype, before: Stack | None = None, kept: Sequence[int] = ()
) -> Stack:
    """Build the stack of one matrix for activations of `dtype`. Raises `AdapterError`.

    Factors of an earlier stack are copied, because their files may be gone: `kept` are the adapters' slots in `before`, 0 for new ones. A
    magnitude needs the base matrix.
    """
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
    """Return the factors in 16 bits if lossless, which halves the bytes of a step. Most files have 16 bits."""
    if factors.dtype == mx.float32:
        for dtype in (mx.bfloat16, mx.float16):
            narrow = factors.astype(dtype)
            if mx.array_equal(narrow.astype(mx.float32), factors).item():
                return narrow
    return factors


def _single(a: Packed, b: Packed) -> tuple[tuple[Packed, Packed], ...]:
    """Return views of each slot's factors."""
    parts = [tuple(replace(part, data=part.data[slot]) for part in (a, b)) for slot in range(a.data.shape[0])]
    mx.eval([part.data for pair in parts for part in pair])
    return tuple((first, second) for first, second in parts)


@dataclass(slots=True)
class _StackSlot:
    """One adapter's part of a `Stack` in float32."""

    a: mx.array
    b: mx.array
    gain: mx.array


def _empty(changes: MatrixChanges) -> _StackSlot:
    out, into = changes.shape
    return _StackSlot(mx.zeros((into, changes.rank)), mx.zeros((changes.rank, out)), mx.ones(out))


def _slot(changes: MatrixChanges, updates: Mapping[str, Update]) -> _StackSlot:
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


def _moved(changes: MatrixChanges, adapter: Adapter, before: Stack, number: int) -> _StackSlot:
    """Convert a slot of an earlier stack, whose projections and ranks may differ."""
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


def ordered(factors: Factors, place: AdapterTarget) -> Factors:
    """Return the factors with the rows of `b` in the order of the graph's matrix."""
    if place.order is None:
        return factors
    order = mx.array(place.order)
    return Factors(factors.a, factors.b[order], None if factors.magnitude is None else factors.magnitude[order])


def row_gain(linear: Linear, place: AdapterTarget, update: Update, factors: Factors) -> mx.array:
    """Return magnitude over length of each row of the updated matrix, float32 `[rows]`; ones without a magnitude."""
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
    """Return rows of a matrix in float32."""
    matrix = linear.matrix
    if isinstance(matrix, Packed):
        return matrix.rows(mx.arange(first, last), mx.float32)
    return numbers(matrix)[first:last]


class AdaptedLinear(Linear):
    """Replaces `base` in the graph for steps with adapters; it has no matrix."""

    def __init__(self, base: Linear, stack: Stack, choice: AdapterChoice) -> None:
        self.base, self.stack, self.choice = base, stack, choice
        self.projections = base.projections

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """See `Linear`."""
        if not self._changes():
            return self.base(x, norm=norm, onto=onto)
        if norm is not None and not (isinstance(self.base.matrix, Packed) and isinstance(self.stack.a, Packed)):
            rows = norm(x)
            if not isinstance(self.base.matrix, Packed):
                x, norm = rows, None  # a packed product applies the norm itself, as in steps without adapters
            return self._sum(x, norm, rows, None, onto)
        return self._sum(x, norm, x, norm, onto)

    def _sum(self, x: mx.array, norm: RMSNorm | None, rows: mx.array, rows_norm: RMSNorm | None, onto: mx.array | None) -> mx.array:
        stack, choice = self.stack, self.choice
        if stack.gain is None:
            return stack.added(self.base(x, norm=norm, onto=onto), rows, choice, rows_norm)
        y = stack.added(stack.rescaled(self.base(x, norm=norm), choice), rows, choice, rows_norm)
        return y if onto is None else onto + y

    def can_gate(self, activation: str) -> bool:
        """See `Linear`; True if `base` supports it."""
        return self.base.can_gate(activation)

    def gated(self, activation: str, x: mx.array, *, norm: RMSNorm | None = None) -> mx.array:
        """See `Linear`. Rows without an adapter are bit-identical to those of a step without adapters."""
        if not self._changes():
            return self.base.gated(activation, x, norm=norm)
        changed, same = self.stack.changed, self._gates_alike(activation, x)
        if same and x.shape[0] == 1:
            return self._gated_row(activation, x, norm)
        if same or self.choice.slots <= changed:
            return self._gated(activation, x, norm)
        y = self.base.gated(activation, x, norm=norm)
        return mx.where(self.choice.changed(changed), self._gated(activation, x, norm), y)

    def _gated(self, activation: str, x: mx.array, norm: RMSNorm | None) -> mx.array:
        gate, up = mx.split(self(x, norm=norm), 2, axis=-1)
        return _gate(activation)(gate, up)

    def _gates_alike(self, activation: str, x: mx.array) -> bool:
        """Return True if a fused gate and a separate gate give equal results."""
        plain = self.stack.gain is None and self.base.bias is None and isinstance(self.stack.a, Packed)
        return plain and activation == "silu" and x.dtype == mx.float32

    def _gated_row(self, activation: str, x: mx.array, norm: RMSNorm | None) -> mx.array:
        """Compute a single row, with its update as the bias of the base product."""
        assert isinstance(self.base.matrix, Packed)
        bias = self.stack.added(None, x, self.choice, norm).reshape(-1)
        if norm is None:
            return self.base.matrix.multiply(x, bias=bias, gate=activation)
        return self.base.matrix.multiply(x, bias=bias, gate=activation, norm=norm.weight, eps=norm.eps)

    def _changes(self) -> bool:
        return not self.choice.slots.isdisjoint(self.stack.changed)


def _gate(activation: str) -> Gate:
    """Return the gated unit for packed matrices."""
    return kernels_cpu.silu_multiply if activation == "silu" else gated_again(activation)
