"""The cache of all running sequences: slots, page tables per window, and storage per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .attention import AttentionBackend
from .backend import attention_backend
from .base import PAGE, AttentionSpec, LayerSpec, OpaqueSpec, OpaqueState, RecurrentSpec, Segment
from .format import KVFormat
from .pages import AttentionGroup, PageAllocator, PageTable, pages_for
from .recurrent import RecurrentStore
from .step import CacheStep
from .store import LayerStore


@dataclass(slots=True)
class _Slots:
    free: list[int] = field(default_factory=list)
    count: int = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count - 1


class PagedCache:
    """Keys, values and states of every running sequence.

    `open` gives a sequence a slot, `begin` lays out a step, `commit` seals the pages that a finished step filled, and `release`
    takes everything back. Sequences share sealed pages after `fork`.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        dtype: mx.Dtype,
        capacity_tokens: int,
        chunk: int,
        kv: KVFormat | None = None,
        backend: Callable[[LayerStore], AttentionBackend] = attention_backend,
    ) -> None:
        """`capacity_tokens` bounds the tokens of all sequences together; `chunk` is the most that one step computes of a sequence;
        `backend` says how a layer attends."""
        kv = kv or KVFormat()
        self.layers = tuple(layers)
        self.chunk = chunk
        self._slots = _Slots()
        self._opaque: dict[int, OpaqueState] = {}
        self._stores: dict[int, LayerStore] = {}
        self._recurrent: dict[int, RecurrentStore] = {}
        self._groups: dict[int | None, AttentionGroup] = {}
        self._backends: dict[tuple[AttentionGroup, AttentionBackend], list[int]] = {}
        capacity = max(capacity_tokens // PAGE, 1)
        for index, spec in enumerate(self.layers):
            if isinstance(spec, AttentionSpec):
                self._stores[index] = store = LayerStore(spec, dtype, kv)
                group = self._groups.setdefault(spec.window, AttentionGroup(spec.window, capacity, first=kv.first16))
                group.layers.append(index)
                self._backends.setdefault((group, backend(store)), []).append(index)
            elif isinstance(spec, RecurrentSpec):
                self._recurrent[index] = RecurrentStore(spec)

    @staticmethod
    def token_bytes(layers: Sequence[LayerSpec], dtype: mx.Dtype, kv: KVFormat | None = None) -> float:
        """Bytes that each further token of context costs, in the layers without a window."""
        specs = [s for s in layers if isinstance(s, AttentionSpec) and s.window is None]
        return sum(LayerStore.page_bytes(s, dtype, kv) for s in specs) / PAGE

    @staticmethod
    def sequence_bytes(layers: Sequence[LayerSpec], dtype: mx.Dtype, kv: KVFormat | None = None) -> int:
        """Bytes that a sequence has beside its tokens' share: its open page, and its first one where that stays at 16 bits."""
        pages = 2 if kv and kv.first16 else 1
        return pages * sum(LayerStore.page_bytes(s, dtype) for s in layers if isinstance(s, AttentionSpec))

    @property
    def can_fork(self) -> bool:
        return not any(isinstance(s, OpaqueSpec) for s in self.layers)

    def fits(self, tokens: int, reserved: Sequence[int]) -> bool:
        """Whether a sequence that grows to `tokens` fits beside others that may grow to `reserved` each."""
        for window, group in self._groups.items():
            wanted = sum(pages_for(t, window, self.chunk) for t in (*reserved, tokens))
            if wanted > group.allocator.capacity:
                return False
        return True

    def open(self) -> int:
        """A slot for a new sequence, empty."""
        slot = self._slots.take()
        for recurrent in self._recurrent.values():
            recurrent.grow(self._slots.count)
            recurrent.reset(slot)
        for store in self._stores.values():
            store.grow(slots=self._slots.count)
        for group in self._groups.values():
            group.tables[slot] = PageTable()
        opaque = [s for s in self.layers if isinstance(s, OpaqueSpec)]
        if opaque:
            self._opaque[slot] = opaque[0].make()
        return slot

    def fork(self, slot: int) -> int:
        """A slot with the same past: sealed pages are shared, the open page and states copied."""
        assert self.can_fork
        new = self.open()
        for group in self._groups.values():
            table = group.tables[slot]
            group.share(table.pages)
            group.tables[new] = PageTable(table.first, list(table.pages))
        for store in self._stores.values():
            store.copy_open(slot, new)
        for recurrent in self._recurrent.values():
            recurrent.copy(slot, new)
        return new

    def release(self, slot: int) -> None:
        for group in self._groups.values():
            group.release(group.tables.pop(slot).pages)
        self._opaque.pop(slot, None)
        self._slots.free.append(slot)

    def begin(self, segments: Sequence[Segment]) -> CacheStep:
        """A step over these segments. It must be committed, if `needs_commit`, before the next one begins."""
        segments = tuple(segments)
        attention = {}
        for (group, backend), layers in self._backends.items():
            attend = backend.begin(segments, group)
            attention.update({layer: (self._stores[layer], attend) for layer in layers})
        return CacheStep(segments, attention, self._recurrent, self._opaque)

    def commit(self, step: CacheStep) -> None:
        """Seal the pages that the step filled, and free those that have left their window. The step must have been evaluated."""
        for window, group in self._groups.items():
            for segment in step.segments:
                self._seal(group, segment, step)
                if window is not None:
                    table = group.tables[segment.slot]
                    group.release(table.drop_before(segment.past + segment.count - window + 1))
        step.full.clear()
        mx.eval([a for s in self._stores.values() for a in s.arrays])

    def _seal(self, group: AttentionGroup, segment: Segment, step: CacheStep) -> None:
        if not segment.filled:
            return
        pages = group.extend(group.tables[segment.slot], segment.filled)
        room = _room(group.allocator, pages_for(segment.total, group.window, self.chunk))
        first = _room(group.first, 1, least=1) if group.first else 0
        for layer in group.layers:
            store = self._stores[layer]
            store.grow(pages=room, first=first)
            store.seal(pages, step.full[layer, segment.slot])

    def state(self, slot: int) -> list[mx.array]:
        """The states of a sequence's recurrent layers as they are now, whatever happens to the slot; empty if there are no such layers."""
        return [mx.contiguous(array[slot]) for store in self._recurrent.values() for array in store.arrays]

    def restore(self, slot: int, state: list[mx.array]) -> None:
        """Put back what `state` gave."""
        values = iter(state)
        for store in self._recurrent.values():
            for array in store.arrays:
                array[slot] = next(values)

    def nbytes(self) -> int:
        """Bytes held now, in all layers."""
        paged = sum(a.nbytes for s in self._stores.values() for a in s.arrays)
        return paged + sum(a.nbytes for s in self._recurrent.values() for a in s.arrays)


def _room(allocator: PageAllocator, wanted: int, least: int = 4) -> int:
    """Pages of storage for the pages in use and those that a sequence is known to fill: grown by half, so that copying a pool to grow
    it stays rare."""
    size = least
    while size < max(allocator.extent, wanted):
        size += max(size // 2, 1)
    return min(size, max(allocator.capacity, allocator.extent))
