"""Resident experts of one layer: slots that hold the experts in use, and reads that bring the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from time import perf_counter

import mlx.core as mx
import numpy as np

from ..util.uncached_file import PAGE
from .file_format import LayerRecord, expert_bytes
from .reader import ExpertRead, ExpertReader
from .scores import ExpertScores

LEAST_SLOTS = 2
"""Minimum slots of a pool."""
_OVERLAP_ROWS = 16
"""Minimum rows for computing with resident experts while the others are read. Fewer rows take less time than a second wave costs."""
Allocate = Callable[[tuple[int, ...], mx.Dtype], mx.array]
"""Returns an evaluated array of a shape, with any content, whose memory no other array uses."""


class ReadbackClock:
    """Counts how often chosen experts were read back. Experts that the last readback chose are in use by the device."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class ExpertPool:
    """Slots for some experts of one layer, or for all of them.

    One thread at a time may call `waves`, `prefetch` and `resize`. The resident expert with the lowest of `ExpertScores` is evicted.
    """

    def __init__(
        self, layer: LayerRecord, reader: ExpertReader, slots: int, clock: ReadbackClock | None = None, allocate: Allocate | None = None
    ) -> None:
        """Prepare `slots` slots, at least `LEAST_SLOTS` and at most one per expert. With a slot for each expert, all are read.

        `allocate` makes the arrays; by default they are aligned for a disk that writes into them. Raises `ExpertReadError`.
        """
        self.layer, self.experts = layer, layer.experts
        self._reader, self._new = reader, allocate or aligned
        self._expert_bytes = layer.expert_bytes
        self._clock = clock or ReadbackClock()
        self._lock = threading.Lock()
        self._scores = ExpertScores(layer.experts)
        self._chosen = np.zeros(layer.experts, bool)
        self._pending: dict[int, tuple[int, ExpertRead]] = {}
        """Slot and read by expert, for reads that are not over or not noticed yet."""
        self._unused_predictions: set[int] = set()
        self._used_at = -1
        self.hits = self.misses = 0
        """Chosen experts that were resident, and others; an expert that several rows of a call choose counts once."""
        self.predicted = self.predicted_used = 0
        """Reads that `prefetch` started, and those of them whose expert was chosen next."""
        self.bytes_read = 0
        self.waiting_s = 0.0
        self.on_resize: list[Callable[[], None]] = []
        """Called after `resize` has replaced `arrays`: holders of the old arrays drop them there, or their memory is not free."""
        self.slots, self.is_complete = 0, False
        """`is_complete` is True if every expert is resident, in the slot of its own number. Nothing is read or waited for then."""
        self.arrays: dict[str, mx.array] = {}
        """Arrays `[slots, ...]` by name, the same objects until `resize`."""
        self._views: list[np.ndarray] = []
        self._slot_of = np.full(self.experts, -1, np.int32)
        self._expert_in = np.empty(0, np.int64)
        self._in_use = np.empty(0, bool)
        self.resize(slots)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots."""
        return self.slots * self._expert_bytes

    @property
    def resident(self) -> frozenset[int]:
        """Experts that are in slots."""
        return frozenset(int(expert) for expert in self._expert_in if expert >= 0)

    def waves(self, chosen: np.ndarray, *, overlap: bool | None = None) -> Iterator[np.ndarray]:
        """Yield int32 arrays of the shape of `chosen`: the slot of each entry, or -1 for entries of other waves.

        `chosen` are experts `[..., k]`, integers from 0 to `experts - 1`. Each entry has a slot in exactly one wave, and no expert is read
        twice. All work that read earlier slots of this pool must be done. The call starts the first reads, and requesting a wave waits for
        its reads. A wave's slots are valid until the next wave is requested.

        There is a single wave if the distinct experts fit. With `overlap`, by default for many rows, resident experts come first and the
        others are read meanwhile. Raises `ExpertReadError` if a read fails, and ValueError for numbers beyond `experts`.
        """
        if self.is_complete or not chosen.size:
            return iter((chosen.astype(np.int32),))
        needed, missing = self._note(chosen)
        if not len(missing):
            return iter((self._slot_of[chosen],))
        chosen = chosen.copy()
        rows = chosen.size // chosen.shape[-1]
        split = (rows >= _OVERLAP_ROWS if overlap is None else overlap) and len(missing) < len(needed)
        groups = self._groups(needed, missing) if split or len(needed) > self.slots else [needed]
        return self._group_by_group(chosen, groups, self._demand(groups[0]))

    def _note(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Update scores and counts. Returns the distinct experts, and those of them that are not resident."""
        with self._lock:
            clock = self._clock
            clock.now += 1
            self._used_at = clock.now
            if self._pending:
                self._collect()
            marks = self._chosen
            marks[:] = False
            try:
                marks[chosen] = True
            except IndexError:
                raise ValueError(f"experts are numbers below {self.experts}, not {chosen.max()}") from None
            needed = np.flatnonzero(marks)
            self._scores.add(chosen, needed)
            slots = self._slot_of[needed]
            missing = needed[slots < 0]
            self.hits += len(needed) - len(missing)
            self.misses += len(missing)
            self._in_use[:] = False
            self._in_use[slots[slots >= 0]] = True
            if self._pending:
                self._in_use[[slot for expert, (slot, _) in self._pending.items() if marks[expert]]] = True
            if self._unused_predictions:
                self._count_predictions(needed)
            return needed, missing

    def _count_predictions(self, needed: np.ndarray) -> None:
        used = self._unused_predictions.intersection(needed.tolist())
        self.predicted_used += len(used)
        self._unused_predictions -= used

    def _demand(self, experts: np.ndarray) -> list[ExpertRead]:
        """Start reading experts, the coldest of the unused slots first."""
        with self._lock:
            reads, new, wanted = [], [], []
            for expert in experts.tolist():
                if self._slot_of[expert] >= 0:
                    continue
                known = self._pending.get(expert)
                if known is None:
                    wanted.append(expert)
                else:
                    self._reader.promote(known[1])
                    self._in_use[known[0]] = True
                    reads.append(known[1])
            if wanted:
                for expert, slot in zip(wanted, self._victims(len(wanted)), strict=True):
                    new.append(self._start(expert, slot))
                    self._in_use[slot] = True
                self._reader.submit(new, demanded=True, helped=True)
            return reads + new

    def _victims(self, count: int) -> list[int]:
        """Empty `count` slots: free ones first, then those with the lowest scores, then those of predictions that wait or are read."""
        pending = {slot: (expert, read) for expert, (slot, read) in self._pending.items()}
        found = self._coldest()[:count]
        for slot, (expert, read) in pending.items():
            if len(found) == count:
                break
            if not self._in_use[slot]:
                if not self._reader.cancel(read):
                    self._reader.wait([read])
                del self._pending[expert]
                self._unused_predictions.discard(expert)
                found.append(slot)
        assert len(found) == count
        for slot in found:
            self._evict(slot)
        return found

    def _evict(self, slot: int) -> None:
        expert = self._expert_in[slot]
        self._expert_in[slot] = -1
        if expert >= 0:
            self._slot_of[expert] = -1
            self._unused_predictions.discard(int(expert))

    def _start(self, expert: int, slot: int) -> ExpertRead:
        layer = self.layer
        targets = [view[slot] for view in self._views]
        read = ExpertRead(layer.offset + expert * layer.stride, self._expert_bytes, layer.stride, targets)
        self._pending[expert] = (slot, read)
        return read

    def _collect(self) -> None:
        """Make experts resident whose reads are over. A read that failed frees its slot."""
        for expert, (slot, read) in [*self._pending.items()]:
            if read.is_over:
                del self._pending[expert]
                if read.is_whole:
                    self.bytes_read += self._expert_bytes
                    self._slot_of[expert] = slot
                    self._expert_in[slot] = expert
                else:
                    self._unused_predictions.discard(expert)

    def _wait(self, reads: Sequence[ExpertRead]) -> None:
        """Wait for reads and make their experts resident. Raises `ExpertReadError`."""
        begun = perf_counter()
        self._reader.wait(reads)
        with self._lock:
            self.waiting_s += perf_counter() - begun
            self._collect()
        for read in reads:
            if not read.is_whole:
                raise self._reader.failed(read)

    def _groups(self, needed: np.ndarray, missing: np.ndarray) -> list[np.ndarray]:
        """Divide experts into groups for waves: those that are resident and others, or groups of at most half of the slots.

        Two consecutive groups and the experts of later ones that have slots never need more than all slots.
        """
        # Experts without a slot come last, because the others keep theirs until they are used. Of each kind, those that are used most come
        # last: they stay resident.
        kind = np.zeros(self.experts, np.int8)
        kind[missing] = 2
        kind[[expert for expert in self._pending if kind[expert]]] = 1
        order = needed[np.lexsort((self._scores.values[needed], kind[needed]))]
        if len(order) <= self.slots:
            resident = len(needed) - len(missing)
            return [order[:resident], order[resident:]]
        return np.array_split(order, -(-len(order) // (self.slots // 2)))

    def _group_by_group(self, chosen: np.ndarray, groups: list[np.ndarray], reads: list[ExpertRead]) -> Iterator[np.ndarray]:
        """Yield a wave per group; `reads` are those of the first. The next group is read into other slots meanwhile."""
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            self._wait(reads)
            with self._lock:
                table = np.full(self.experts, -1, np.int32)
                table[group] = self._slot_of[group]
            reads = [] if following is None else self._demand(following)
            yield table[chosen]
            if following is not None:
                self._in_use[table[group]] = False

    def prefetch(self, experts: np.ndarray) -> None:
        """Read experts that are predicted, most probable first, without waiting. Never evicts an expert that the device may use.

        Earlier predictions that have not started are dropped.
        """
        if self.is_complete:
            return
        with self._lock:
            if self._pending:
                self._collect()
            wanted = dict.fromkeys(int(expert) for expert in experts.reshape(-1))
            for expert in [expert for expert in self._pending if expert not in wanted]:
                if self._reader.cancel(self._pending[expert][1]):
                    del self._pending[expert]
                    self._unused_predictions.discard(expert)
            new = [expert for expert in wanted if self._slot_of[expert] < 0 and expert not in self._pending]
            if not new:
                return
            if self._used_at != self._clock.now:
                self._in_use[:] = False
            slots = self._coldest(besides=[*wanted])
            reads = []
            for expert, slot in zip(new, slots, strict=False):
                self._evict(slot)
                reads.append(self._start(expert, slot))
                self._unused_predictions.add(expert)
            self.predicted += len(reads)
            if reads:
                self._reader.submit(reads, demanded=False)

    def _coldest(self, besides: Sequence[int] = ()) -> list[int]:
        """Return slots that may be emptied, free ones first, then those with the lowest scores.

        Slots in use, slots that a read fills, and those of the experts `besides` are not among them.
        """
        keys = np.where(self._expert_in >= 0, self._scores.values[self._expert_in], -1.0)
        keys[self._in_use] = np.inf
        keys[[slot for slot, _ in self._pending.values()]] = np.inf
        kept = self._slot_of[[*besides]]
        keys[kept[kept >= 0]] = np.inf
        order = np.argsort(keys, kind="stable")
        return [*map(int, order[np.isfinite(keys[order])])]

    def resize(self, slots: int) -> None:
        """Change the number of slots and keep the experts with the highest scores. `arrays` are new objects afterwards.

        All work of the device must be done. Needs memory for the old and the new slots. Raises `ExpertReadError` if a slot for each expert
        is wanted and one cannot be read.
        """
        # Two waves at least need slots at once: one is computed, the other is read.
        slots = min(max(slots, LEAST_SLOTS), self.experts)
        if slots == self.slots and (self.is_complete or slots < self.experts):
            return
        with self._lock:
            self._drain()
            best = np.flatnonzero(self._slot_of >= 0)
            best = best[np.argsort(-self._scores.values[best], kind="stable")][:slots]
            arrays = {each.name: self._new((slots, *each.shape), each.mlx_dtype) for each in self.layer.arrays}
            views = [expert_bytes(array) for array in arrays.values()]
            targets = best if slots == self.experts else np.arange(len(best))
            for old, new in zip(self._views, views, strict=False):
                for source, target in zip(self._slot_of[best].tolist(), targets.tolist(), strict=True):
                    new[target] = old[source]
            slot_of, expert_in, in_use = np.full(self.experts, -1, np.int32), np.full(slots, -1, np.int64), np.zeros(slots, bool)
            slot_of[best] = targets
            expert_in[targets] = best
            # Without calls in between, a signal handler cannot interrupt these lines.
            self.slots, self.is_complete, self.arrays, self._views = slots, False, arrays, views
            self._slot_of, self._expert_in, self._in_use = slot_of, expert_in, in_use
        for call in self.on_resize:
            call()
        if slots == self.experts:
            self._read_all()
            self.is_complete = True

    def _drain(self) -> None:
        """End all reads. Those that had started become resident."""
        for expert, (_, read) in [*self._pending.items()]:
            if self._reader.cancel(read):
                del self._pending[expert]
                self._unused_predictions.discard(expert)
        self._reader.wait([read for _, read in self._pending.values()])
        self._collect()

    def _read_all(self) -> None:
        """Read the experts that are not resident, each into the slot of its own number."""
        with self._lock:
            absent = np.flatnonzero(self._slot_of < 0).tolist()
            reads = [self._start(expert, expert) for expert in absent]
            self._reader.submit(reads, demanded=True, helped=True)
        self._wait(reads)

    def close(self) -> None:
        """End all reads and drop the arrays."""
        with self._lock:
            self._drain()
            self.arrays, self._views = {}, []
            self.on_resize.clear()


def aligned(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return an evaluated array at a multiple of `PAGE`."""
    nbytes = prod(shape) * dtype.size
    raw = mx.zeros(nbytes + PAGE, mx.uint8)
    mx.eval(raw)
    begin = -np.array(raw, copy=False).ctypes.data % PAGE
    array = raw[begin : begin + nbytes].view(dtype).reshape(shape)
    mx.eval(array)
    return array
