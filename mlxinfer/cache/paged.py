"""Cache of all running sequences: slots, page tables per window, and storage per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING

import mlx.core as mx

from .attention.apart import ApartStep
from .attention.native import AttentionBackend, NativeStep, StepAttention
from .attention.reference import PlainAttention, PlainStep
from .attention.select import attention_backend
from .base import PAGE, AttentionSpec, BidirectionalSpec, LayerSpec, OpaqueSpec, OpaqueState, RecurrentSpec, Segment, whole_spec
from .kv_events import AllBlocksCleared, KVEventSink, PrefixEvents
from .kv_format import KVFormat
from .pages import AttentionGroup, PageAllocator, pages_for
from .pool import PageDemand, PagePool, Places, PoolUsage
from .prefix_match import Match, Ranges
from .state import RecurrentStore, Rows, put_rows, rows_elsewhere, take_rows
from .step import CacheStep
from .store import LayerStore

if TYPE_CHECKING:
    from .disk.backend import PageSource
    from .disk.kv_export import KVExport
    from .disk.layout import CacheLayout
    from .disk.prefetch import PrefixPrefetcher
    from .disk.write_back import WriteBack

_LEAST_WRITING_S = 0.2
"""Minimum seconds of `close` for writing data that is already copied."""


class PagedCache:
    """Keys, values and states of all running sequences, and the prefix cache.

    `open` assigns a slot to a sequence, `begin` lays out a step, `seal` and `submit` (or `commit`, which is both) store the pages that it
    filled, and `release` frees the slot. Sequences with a common prefix share its pages; see `PagePool`.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        dtype: mx.Dtype,
        kv_cache_tokens: int,
        chunk: int,
        kv: KVFormat | None = None,
        layer_kv: Mapping[int, KVFormat] | None = None,
        backend: Callable[[LayerStore], AttentionBackend] = attention_backend,
        fingerprint: str = "",
        prefix_cache_tokens: int = 0,
        snapshot_bytes: int = 0,
        disk: PageSource | None = None,
    ) -> None:
        """Create a cache for these layers.

        `kv_cache_tokens` bounds the tokens of all sequences and the prefix cache; `chunk` is the maximum of tokens per sequence and step.
        `layer_kv` overrides `kv` for single layers, for measurements. `backend` selects a layer's attention backend. `fingerprint`
        identifies the weights. The prefix cache has up to `prefix_cache_tokens` tokens, and `snapshot_bytes` of open pages and recurrent
        states; 0 for both disables it. `disk` stores it across restarts, or fetches pages of other machines.
        """
        kv = kv or KVFormat()
        self.layers = tuple(layers)
        self._dtype = dtype
        self._opaque: dict[int, OpaqueState] = {}
        self._bidirectional = {i: s for i, s in enumerate(self.layers) if isinstance(s, BidirectionalSpec)}
        self._recurrent = {i: RecurrentStore(s) for i, s in enumerate(self.layers) if isinstance(s, RecurrentSpec)}
        formats = layer_kv or {}
        self._stores = {i: LayerStore(s, dtype, formats.get(i, kv)) for i, s in enumerate(self.layers) if isinstance(s, AttentionSpec)}
        everywhere = list(map(whole_spec, self.layers))
        self.pool = PagePool(
            [spec.window for spec in everywhere if isinstance(spec, AttentionSpec)],
            kv_cache_tokens=kv_cache_tokens,
            chunk=chunk,
            first=kv.first16,
            fingerprint=repr((fingerprint, kv, str(dtype), [s for s in self.layers if not isinstance(s, OpaqueSpec)])),
            prefix_cache_tokens=prefix_cache_tokens if self.can_fork else 0,
            snapshot_bytes=snapshot_bytes if self.can_fork else 0,
            exact=self._keeps_states,
        )
        self._unsubmitted = False
        self._backends: dict[tuple[AttentionGroup, AttentionBackend, bool], list[int]] = {}
        """Layers that are prepared together in each step, by group, backend and `AttentionSpec.sees_spans`."""
        groups = {group.window: group for group in self.pool.groups}
        for index, store in self._stores.items():
            group = groups[store.spec.window]
            group.layers.append(index)
            self._backends.setdefault((group, backend(store), store.spec.sees_spans), []).append(index)
        self._storage: PageSource | None = None
        self._prefetcher: PrefixPrefetcher | None = None
        self._write_back: WriteBack | None = None
        if disk and self.pool.index is not None:
            self._open_storage(disk)

    @property
    def _keeps_states(self) -> bool:
        """True if sequences cannot resume without recurrent states."""
        return any(isinstance(s, RecurrentSpec) and not s.optional for s in map(whole_spec, self.layers))

    @cached_property
    def kv_export(self) -> KVExport | None:
        """Export of pages to other machines; None without a prefix cache."""
        from .disk.kv_export import KVExport

        return None if self.pool.index is None else KVExport(self.pool.index, self._file_layout)

    def _open_storage(self, storage: PageSource) -> None:
        """Read prefixes from a storage, and write them back if it is a disk of this machine."""
        from .disk.prefetch import PrefixPrefetcher
        from .disk.storage import DiskStorage
        from .disk.write_back import WriteBack

        assert self.pool.index is not None
        self._storage = storage
        self._prefetcher = PrefixPrefetcher(self.pool.index, storage, self._file_layout, self._reserve)
        self._write_back = WriteBack(self.pool.index, storage, self._file_layout) if isinstance(storage, DiskStorage) else None

    @cached_property
    def _file_layout(self) -> CacheLayout:
        from .disk.layout import CacheLayout

        return CacheLayout(self.pool.groups, self._stores, self._recurrent)

    @staticmethod
    def token_bytes(layers: Sequence[LayerSpec], dtype: mx.Dtype, kv: KVFormat | None = None) -> float:
        """Return the bytes per token of context, in layers without a window."""
        specs = [s for s in layers if isinstance(s, AttentionSpec) and s.window is None]
        return sum(LayerStore.page_bytes(s, dtype, kv) for s in specs) / PAGE

    @staticmethod
    def reuse_bytes(layers: Sequence[LayerSpec], dtype: mx.Dtype, kv: KVFormat | None = None) -> float:
        """Return the bytes per token of the prefix cache in layers with a window, whose pages running sequences soon free."""
        specs = [s for s in layers if isinstance(s, AttentionSpec) and s.window is not None]
        return sum(LayerStore.page_bytes(s, dtype, kv) for s in specs) / PAGE

    @staticmethod
    def sequence_bytes(layers: Sequence[LayerSpec], dtype: mx.Dtype, kv: KVFormat | None = None) -> int:
        """Return the bytes per sequence besides its tokens: the open page, and a first page at 16 bits."""
        pages = 2 if kv and kv.first16 else 1
        return pages * sum(LayerStore.page_bytes(s, dtype) for s in layers if isinstance(s, AttentionSpec))

    @property
    def attention(self) -> list[tuple[LayerStore, AttentionBackend]]:
        """Storage and backend of each attention layer."""
        return [(self._stores[layer], backend) for (_, backend, _), layers in self._backends.items() for layer in layers]

    @property
    def recurrent(self) -> list[RecurrentStore]:
        """States of each recurrent layer."""
        return list(self._recurrent.values())

    @property
    def can_fork(self) -> bool:
        """True if sequences can share state, which forks and the prefix cache need."""
        return not any(isinstance(s, (OpaqueSpec, BidirectionalSpec)) for s in self.layers)

    def fits(self, tokens: int) -> bool:
        """Return True if a sequence of `tokens` tokens fits in an otherwise empty cache."""
        return self.pool.fits(tokens)

    def room(self, growth: Sequence[PageDemand]) -> bool:
        """Return True if the next step can get pages for all of these, free or evictable."""
        return self.pool.room(growth)

    def find(self, tokens: Sequence[int], cache_salt: str = "", spans: Ranges = ()) -> Match:
        """Return the cached prefix of `tokens` (never the last one) and the reason for its end.

        Pages also depend on `cache_salt`. The prefix divides none of `spans`. The match is valid until the cache changes.
        """
        if not self.can_fork:
            return Match(0, "this model keeps a state of its own, which cannot be shared", cache_salt)
        return self.pool.find(tokens, cache_salt, spans)

    def open(self, match: Match | None = None, cache_salt: str | None = "") -> int:
        """Return a slot for a new sequence that starts with `match.reused` tokens.

        With `cache_salt` None, its pages do not enter the prefix cache.
        """
        slot = self.pool.open(match, cache_salt)
        if self._prefetcher and match:
            self._prefetcher.used(match)
        snapshot = match.snapshot if match else None
        if match is None or snapshot is None:
            self._begin_slot(slot, None, 0)
        else:
            assert isinstance(snapshot.content, Rows)
            # only optional states can be missing
            self._begin_slot(slot, snapshot.content, match.reused % PAGE, states=match.reused == snapshot.position)
        opaque = [s for s in self.layers if isinstance(s, OpaqueSpec)]
        if opaque:
            self._opaque[slot] = opaque[0].make()
        return slot

    def _begin_slot(self, slot: int, rows: Rows | None, count: int, *, states: bool = True) -> None:
        """Initialize a slot with `count` open rows and the states of a snapshot, or empty."""
        self._grow_slots()
        if rows is not None:
            put_rows(rows, slot, count, self._stores, self._recurrent)
        if rows is None or not states:
            for recurrent in self._recurrent.values():
                recurrent.reset(slot)
        if rows is not None:
            self._submit_open()

    def _grow_slots(self) -> None:
        for store in self._stores.values():
            store.grow(slots=self.pool.slot_count)

    def fork(self, slot: int) -> int:
        """Return a new slot with the same past: sealed pages are shared, open page and states copied."""
        assert self.can_fork
        new = self.pool.fork(slot)
        self._copy_slot(slot, new)
        return new

    def _copy_slot(self, slot: int, new: int) -> None:
        """Copy the open page and the states of a slot to another."""
        self._grow_slots()
        for store in self._stores.values():
            store.copy_open(slot, new)
        self._submit_open()
        for recurrent in self._recurrent.values():
            recurrent.copy(slot, new)

    def _submit_open(self) -> None:
        """Submit all layers together, because the next step would otherwise wait for each layer in turn."""
        mx.async_eval([a for store in self._stores.values() for a in store.open])  # type: ignore[no-untyped-call]

    def release(self, slot: int) -> None:
        """Free the slot; pages in the prefix cache stay until they are evicted."""
        self.pool.release(slot)
        self._opaque.pop(slot, None)
        for recurrent in self._recurrent.values():
            recurrent.release(slot)

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Snapshot a slot (open page and states) after exactly these tokens, so that other sequences can resume here."""
        self.pool.keep(slot, tokens, partial(self._rows, slot))

    def _rows(self, slot: int, count: int) -> tuple[Rows, int]:
        rows = take_rows(slot, count, self._stores, self._recurrent)
        return rows, rows.nbytes + rows_elsewhere(self.layers, count, self._dtype)

    def verified(self, slot: int, rows: int) -> None:
        """Accept the first `rows` rows of a sequence's segment with drafts.

        Recurrent states are set to those after these rows; the next step overwrites keys and values of the others.
        """
        for recurrent in self._recurrent.values():
            recurrent.verified(slot, rows)

    def states(self, layer: int, slots: Sequence[int]) -> mx.array:
        """Return the first state of a recurrent layer for these sequences, float32 `[R, *shape]`."""
        parts = [self._recurrent[layer].of(slot)[0] for slot in slots]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def usage(self) -> PoolUsage:
        return self.pool.usage()

    def prefetch(self, tokens: Sequence[int], cache_salt: str = "", *, store: bool = True) -> bool:
        """Read pages for `tokens` from disk; True while reads are pending. Call until False, before `find`.

        Never blocks. Arrived data is stored, a few megabytes per call, if `store`: no step may be in flight.
        """
        return self._prefetcher is not None and self._prefetcher.prefetch(tokens, cache_salt, store=store)

    @property
    def arrived(self) -> bool:
        """True if `prefetch` has data to store, for which the step in flight must be collected."""
        return self._storage is not None and self._storage.arrived

    def wait(self, timeout_s: float) -> None:
        """Wait for data from disk, when idle."""
        if self._storage:
            self._storage.wait(timeout_s)

    def send_events(self, sink: KVEventSink) -> None:
        """Report the prefix cache's contents to `sink`, and every later change."""
        if self.pool.index is None:
            sink(AllBlocksCleared())
            return
        self.pool.index.listeners = [each for each in self.pool.index.listeners if not isinstance(each, PrefixEvents)]
        self.pool.index.listeners.append(PrefixEvents(self.pool.index, sink))
        if self._storage:
            from .disk.disk_events import DiskEvents

            self._storage.send_events(DiskEvents(sink, self._file_layout.parts, self.pool.index.root_digest()))

    def tidy(self, *, idle: bool = True, store: bool = True) -> bool:
        """Copy a few megabytes of the prefix cache for the disk, between steps; True while more is left.

        Unless `idle`, most calls return at once. `store` is that of `prefetch`, for data whose request has ended.
        """
        if store and self._prefetcher:
            self._prefetcher.take_over()
        return self._write_back is not None and self._write_back.run(idle=idle)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the prefix cache to disk within the time, and release it."""
        deadline = monotonic() + timeout_s
        if self._write_back:
            self._write_back.finish(deadline)
        if self._storage:
            self._storage.close(max(deadline - monotonic(), _LEAST_WRITING_S))
        self._storage = self._prefetcher = self._write_back = None
        if self.pool.index is not None:
            self.pool.index.close()

    def begin(self, segments: Sequence[Segment]) -> CacheStep:
        """Return a step over these segments. If it `needs_commit`, commit it before the next step."""
        segments = tuple(segments)
        if self._bidirectional:
            from .bidirectional import BidirectionalStep

            return BidirectionalStep(segments, self._bidirectional)
        attention: dict[int, tuple[LayerStore, StepAttention]] = {}
        native, spans = True, False
        for segment in segments:
            if segment.spans:
                spans = True
        for (group, backend, sees_spans), layers in self._backends.items():
            apart = spans and sees_spans and not isinstance(backend, PlainAttention)
            attend = ApartStep(backend, segments, group) if apart else backend.begin(segments, group)
            # Layers that skip the first token are not in a run of blocks; they attend separately.
            native = native and (isinstance(attend, NativeStep) or all(self._stores[layer].spec.skips_first for layer in layers))
            for layer in layers:
                attention[layer] = self._stores[layer], attend
        return CacheStep(segments, attention, self._recurrent, self._opaque, runs_blocks=native, has_pages=bool(self.pool.groups))

    def reading(self, segments: Sequence[Segment]) -> CacheStep:
        """Return a read-only step of one row per segment, which attends to earlier tokens by `attend_again` in plain MLX."""
        segments = tuple(segments)
        attention: dict[int, tuple[LayerStore, StepAttention]] = {}
        for group in self.pool.groups:
            plain = PlainStep(segments, group)
            attention.update({layer: (self._stores[layer], plain) for layer in group.layers})
        return CacheStep(segments, attention, self._recurrent, self._opaque, runs_blocks=False)

    def commit(self, step: CacheStep, tokens: Mapping[int, Sequence[int]] | None = None) -> None:
        """Run `seal` and `submit` for an evaluated step."""
        self.seal(step, tokens)
        self.submit()

    def seal(self, step: CacheStep, tokens: Mapping[int, Sequence[int]] | None = None) -> None:
        """Assign places to pages that the step fills, and free pages outside their window.

        Nothing is computed: the step may be in flight, and `submit` must follow. `tokens` by slot are all tokens of a sequence
        so far; pages of slots in `tokens` enter the prefix cache.
        """
        if not step.needs_commit:
            return
        for segment in step.segments:
            if segment.filled:
                self._seal(segment, step, (tokens or {}).get(segment.slot))
                self.pool.leave_behind(segment.slot, segment.past + segment.count)
        step.full.clear()
        self._unsubmitted = True
        for segment in step.segments:
            end = segment.past + segment.count
            if self._keeps_states and not end % PAGE and tokens and segment.slot in tokens:
                self.pool.keep_on_the_way(segment.slot, tokens[segment.slot][:end], partial(self._rows, segment.slot))

    def submit(self) -> None:
        """Start writing the sealed pages, without waiting.

        No step may be in flight, because MLX copies a pool in use instead of writing in place.
        """
        if self._unsubmitted:
            self._unsubmitted = False
            mx.async_eval([a for store in self._stores.values() for a in store.arrays])  # type: ignore[no-untyped-call]

    def _seal(self, segment: Segment, step: CacheStep, tokens: Sequence[int] | None) -> None:
        self._store(segment, step, self.pool.seal(segment.slot, segment.past, segment.count, tokens))

    def _store(self, segment: Segment, step: CacheStep, places: Sequence[Places]) -> None:
        """Write a segment's full pages to their places, by group."""
        for group, pages in zip(self.pool.groups, places, strict=True):
            if all(page is None for page in pages):
                continue
            room = _room(group.allocator, pages_for(segment.total, group.window, self.pool.chunk))
            first = _room(group.first, 1, least=1) if group.first else 0
            for layer in group.layers:
                store = self._stores[layer]
                store.grow(pages=room, first=first)
                store.seal(pages, step.full[layer, segment.slot])

    def _reserve(self, number: int, more: int) -> None:
        """Grow a group's pools for the pages in use and `more` pages."""
        group = self.pool.groups[number]
        room = _room(group.allocator, group.allocator.extent + more)
        first = _room(group.first, 1, least=1) if group.first else 0
        for layer in group.layers:
            self._stores[layer].grow(pages=room, first=first)


def _room(allocator: PageAllocator, wanted: int, least: int = 4) -> int:
    """Return the pages of storage for the pages in use and `wanted`. Growth is by half, because it copies the pool."""
    size = least
    while size < max(allocator.extent, wanted):
        size += max(size // 2, 1)
    return min(size, max(allocator.capacity, allocator.extent))
