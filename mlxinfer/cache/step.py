"""One step of the model, seen from the cache: `Step` of `base.py` over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..kernels_metal.paged_attention.reference import attention
from .base import PAGE, AttentionSpec, LayerSpec, OpaqueState, RecurrentUpdate, Segment
from .pages import PageAllocator, PageTable
from .recurrent import RecurrentStore
from .store import LayerStore


@dataclass(slots=True)
class AttentionGroup:
    """The layers of one window: they hold the same pages, so they share an allocator and each sequence's table."""

    allocator: PageAllocator
    layers: list[int] = field(default_factory=list)
    tables: dict[int, PageTable] = field(default_factory=dict)


class CacheStep:
    """See `cache.base.Step`. Keeps in `full` the pages that this step fills, until the cache commits them."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        layers: Sequence[LayerSpec],
        groups: dict[int | None, AttentionGroup],
        stores: dict[int, LayerStore],
        recurrent: dict[int, RecurrentStore],
        opaque: dict[int, OpaqueState],
    ) -> None:
        self.segments = segments
        self.positions = mx.array([p for s in segments for p in range(s.past, s.past + s.count)], dtype=mx.int32)
        self.full: dict[tuple[int, int], list[mx.array]] = {}
        self._layers = layers
        self._groups = groups
        self._stores = stores
        self._recurrent = recurrent
        self._opaque = opaque

    @property
    def needs_commit(self) -> bool:
        """Whether a page becomes full in this step: the next one then has to wait until it is sealed."""
        return bool(self._stores) and any((s.past + s.count) // PAGE > s.past // PAGE for s in self.segments)

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        spec = self._layers[layer]
        assert isinstance(spec, AttentionSpec)
        table_of = self._groups[spec.window].tables
        outputs = []
        for s in self.segments:
            rows = slice(s.start, s.start + s.count)
            fresh = [k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)]
            keys, values = self._history(layer, s, table_of[s.slot], fresh)
            out = attention(q[rows].swapaxes(0, 1), keys, values, scale=scale, window=spec.window, softcap=softcap, sinks=sinks)
            outputs.append(out.swapaxes(0, 1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _history(self, layer: int, segment: Segment, table: PageTable, fresh: list[mx.array]) -> list[mx.array]:
        """Keys and values that the segment can see, `[Hkv, S, D]`, its own included."""
        store = self._stores[layer]
        window = store.spec.window
        offset = segment.past - table.end
        tails = store.append(segment.slot, offset, fresh)
        filled = (offset + segment.count) // PAGE
        if filled:
            self.full[layer, segment.slot] = [t[:, : filled * PAGE] for t in tails]
        oldest = 0 if window is None else max(segment.past - window + 1, 0)
        start, pages = table.from_position(oldest)
        if pages:
            past = store.past(pages)
            tails = [mx.concatenate([p, t], axis=1) for p, t in zip(past, tails, strict=True)]
        return [t[:, oldest - start :] for t in tails] if oldest > start else tails

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        return self._recurrent[layer].run(self.segments, inputs, update)

    def opaque(self, segment: Segment) -> OpaqueState:
        return self._opaque[segment.slot]

    @property
    def state(self) -> list[mx.array]:
        """The arrays that this step leaves behind: evaluated with its result, so that no graph grows from step to step."""
        arrays = [a for store in self._stores.values() for a in store.arrays]
        arrays += [a for store in self._recurrent.values() for a in store.arrays]
        arrays += [a for pair in self.full.values() for a in pair]
        for segment in self.segments:
            if segment.slot in self._opaque:
                arrays += self._opaque[segment.slot].arrays()
        return arrays
