"""Storage of keys and values for one layer: pools of sealed pages, and the open page of each running sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..util.dataclass import dataclass
from ..util.device import clear_cache, is_gpu
from .base import PAGE, AttentionSpec
from .kv_format import KVFormat
from .kv_quantization import PLAIN, Sealing, keys_alone, page_arrays, unseal_keys, unseal_values
from .recent_rows import RecentRows

Pages = tuple[mx.array, mx.array]
"""Keys and values of consecutive pages, `[Hkv, n, 64, D]` in the compute dtype."""

ALL = slice(None)
"""All KV heads."""


_LARGE_POOL = 2**19
"""Bytes of a layer's pool above which a second copy during growth matters."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Newly filled pages of one sequence and layer in the pools' format."""

    pages: list[mx.array]
    """Arrays `[Hkv, pages, ...]`, in the order of `LayerStore.sealed`."""
    first: list[mx.array]
    """First page of the sequence if stored in a separate pool; otherwise empty."""

    @property
    def arrays(self) -> list[mx.array]:
        return self.pages + self.first


class LayerStore:
    """Keys and values of one attention layer.

    `sealed` holds the pages in the layer's format, keys first: at 16 bits `[Hkv, pages, Dk, 64]` and `[Hkv, pages, 64, Dv]`, otherwise
    codes and scales of each; with `keys_alone` only the keys. `first` is a 16-bit pool for first pages (`format.first16`), or empty. Both
    change only in `seal`, between two steps, so that MLX writes in place. `open` pages `[slots, Hkv, 64, D]` are small and replaced by each
    step. A step of the Metal kernels replaces `recent` instead: rows stored separately until the open pages are read.

    A page's id is its index in `sealed`, or `~index` in `first`.
    """

    def __init__(self, spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat | None = None) -> None:
        self.spec = spec
        self.dtype = dtype
        self.format = form = (form or KVFormat()).for_layer(spec)
        self._key_arrays = 1 if form.k_bits == 16 else 2
        self.keys_alone = keys_alone(spec)
        """True if values are part of the keys and have no arrays."""
        self.sealed = _pool(spec, form, dtype)
        self.first = _pool(spec, KVFormat(), dtype) if form.first16 else []
        self.recent = RecentRows()
        dims = (spec.key_dim,) if self.keys_alone else (spec.key_dim, spec.value_dim)
        self.kept = [mx.zeros((0, spec.kv_heads, PAGE, dim), dtype) for dim in dims]
        """Open pages without the rows in `recent`."""
        self.sizes = 0, 0, 0
        """Numbers of pages in `sealed`, in `first`, and of open pages."""
        self.kernels: object = None
        """Per-layer state of the attention backend."""

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.sealed, *self.first, *self.kept, *self.recent.arrays]

    @property
    def open(self) -> list[mx.array]:
        """Open pages with all rows."""
        self.write_recent()
        return self.kept

    @open.setter
    def open(self, pages: list[mx.array]) -> None:
        self.kept = pages

    def write_recent(self) -> None:
        """Write the recent rows to their pages."""
        if self.recent.spans:
            self.kept, self.recent = self.recent.written(self.kept), RecentRows()

    @property
    def slots(self) -> int:
        """Number of open pages."""
        return self.sizes[2]

    @staticmethod
    def page_bytes(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat | None = None) -> int:
        """Return the bytes of one sealed page of all KV heads."""
        arrays = page_arrays(spec, (form or KVFormat()).for_layer(spec), dtype)
        return spec.kv_heads * sum(math.prod(shape) * kind.size for shape, kind in arrays)

    def grow(self, *, pages: int = 0, first: int = 0, slots: int = 0) -> None:
        """Grow the pools to at least these sizes; never shrink.

        Large pools are copied immediately, so that two copies exist of one layer at a time. The first allocation copies nothing.
        """
        self.sizes = max(self.sizes[0], pages), max(self.sizes[1], first if self.first else 0), max(self.sizes[2], slots)
        if self.sealed[0].shape[1] >= pages and (not self.first or self.first[0].shape[1] >= first):
            self.kept = [_padded(a, 0, slots) for a in self.kept]
            return
        if is_gpu():
            # MLX writes in place only if the array fills its buffer up to 16 kB, and a reused buffer may be 32 kB larger. Such a pool
            # would be copied for each sealed page.
            clear_cache()
        copied = any(a.size for a in (*self.sealed, *self.first))
        self.sealed = [_padded(a, 1, pages) for a in self.sealed]
        self.first = [_padded(a, 1, first) for a in self.first]
        self.kept = [_padded(a, 0, slots) for a in self.kept]
        if copied and sum(a.nbytes for a in (*self.sealed, *self.first)) > _LARGE_POOL:
            mx.eval(self.sealed, self.first)
        elif not copied and is_gpu():
            mx.async_eval(self.sealed, self.first)  # type: ignore[no-untyped-call]  # allocates memory without waiting

    def append(self, slot: int, offset: int, new: list[mx.array]) -> list[mx.array]:
        """Append keys and values `[Hkv, n, D]` after the `offset` tokens of the open page.

        Returns all pages since the last sealed one, `[Hkv, pages, 64, D]`; rows after the last token are undefined.
        """
        tails = []
        for i, fresh in enumerate(new[: len(self.kept)]):
            length = offset + fresh.shape[1]
            if length <= PAGE:
                self.open[i] = _write(self.open[i], slot, offset, fresh)
                tails.append(self.open[i][slot : slot + 1].swapaxes(0, 1))
                continue
            tail = mx.concatenate([self.open[i][slot, :, :offset], fresh], axis=1) if offset else fresh
            rest = length % PAGE
            if rest:
                self.open[i] = _write(self.open[i], slot, 0, tail[:, -rest:])
                tail = _padded(tail, 1, length + PAGE - rest)
            tails.append(tail.reshape(tail.shape[0], -1, PAGE, tail.shape[-1]))
        return tails if len(tails) == len(new) else [*tails, self.values_of(tails[0])]

    def values_of(self, keys: mx.array) -> mx.array:
        """Return the part of keys `[..., Dk]` that serves as values."""
        return keys[..., : self.spec.value_dim]

    def filled(self, pages: Sequence[mx.array], *, starts: bool, sealing: Sealing = PLAIN) -> Filled:
        """Convert full pages `[Hkv, n, 64, D]` of keys and values for `seal`; `starts` is True for a sequence's first pages."""
        keys, values = pages
        first = []
        if starts and self.first:
            first = [keys[:, :1].swapaxes(-1, -2), values[:, :1]][: len(self.first)]
            keys, values = keys[:, 1:], values[:, 1:]
        by = sealing if keys.shape[1] else PLAIN
        coded = [] if self.keys_alone else by.values(values, self.format.v_bits)
        return Filled(by.keys(keys, self.format.k_bits) + coded, first)

    def past(self, pages: list[int], since: mx.array | None = None, heads: slice = ALL) -> list[Pages]:
        """Yield keys and values of these sealed pages in order, in pieces, for these KV heads.

        With `since`, copies and dequantization wait for that array. This bounds how many layers' 16-bit copies exist at once.
        """
        pieces = []
        if pages and pages[0] < 0:
            pieces.append(self._from_first([_chosen(part_of(a, heads), [~pages[0]]) for a in self.first]))
            pages = pages[1:]
        if pages:
            pools = [part_of(a, heads) for a in self.sealed]
            chosen = [_chosen(a, pages) for a in (pools if since is None else mx.depends(pools, [since]))]
            pieces.append(self._from_sealed(chosen))
        return pieces

    def unsealed(self, full: Filled, heads: slice = ALL) -> list[Pages]:
        """Yield keys and values of newly full pages."""
        first = [self._from_first([part_of(a, heads) for a in full.first])] if full.first else []
        return [*first, self._from_sealed([part_of(a, heads) for a in full.pages])]

    def seal(self, pages: Sequence[int | None], full: Filled) -> None:
        """Store full pages under these ids; skip pages with id None."""
        if full.first:
            if pages[0] is not None:
                self.first = _stored(self.first, [~pages[0]], full.first)
            pages = pages[1:]
        self.sealed = _stored(self.sealed, pages, full.pages)

    def open_rows(self, slot: int, count: int) -> list[mx.array]:
        """Copy the first `count` keys and values of an open page, `[Hkv, count, D]` each."""
        return [_copied(a[slot, :, :count]) for a in self.open]

    def put_open(self, slot: int, rows: Sequence[mx.array]) -> None:
        """Initialize a slot's open page with keys and values, `[Hkv, n, D]` each."""
        self.open = [_write(a, slot, 0, new) for a, new in zip(self.open, rows, strict=True)]

    def _from_sealed(self, arrays: list[mx.array]) -> Pages:
        keys, values = arrays[: self._key_arrays], arrays[self._key_arrays :]
        form, dim = self.format, self.spec.value_dim
        k = unseal_keys(keys, form.k_bits, self.dtype)
        if self.keys_alone:
            return k, self.values_of(k)
        if form.quantized:
            # Dequantization uses float32: keys first, so that only one of both is in memory in float32.
            values = mx.depends(values, [k])
        return k, unseal_values(values, form.v_bits, dim, self.dtype)

    def _from_first(self, arrays: list[mx.array]) -> Pages:
        keys = arrays[0].swapaxes(-1, -2)
        return keys, self.values_of(keys) if self.keys_alone else arrays[1]

    def copy_open(self, source: int, target: int) -> None:
        """Copy the open page of one slot to another."""
        self.open = [_write(a, target, 0, a[source]) for a in self.open]


def part_of(array: mx.array, heads: slice) -> mx.array:
    """Return some KV heads of an array whose first axis they are."""
    return array if heads is ALL else array[heads]


def _pool(spec: AttentionSpec, form: KVFormat, dtype: mx.Dtype) -> list[mx.array]:
    return [mx.zeros((spec.kv_heads, 0, *shape), kind) for shape, kind in page_arrays(spec, form, dtype)]


def _chosen(pool: mx.array, pages: list[int]) -> mx.array:
    """Return pages by id; a view if the ids are consecutive."""
    first, count = pages[0], len(pages)
    if pages == list(range(first, first + count)):
        return pool[:, first : first + count]
    return mx.take(pool, mx.array(pages), axis=1)


def _copied(view: mx.array) -> mx.array:
    """Return a copy, because pools are written in place even while referenced."""
    return mx.slice_update(mx.zeros(view.shape, view.dtype), view, mx.array([0]), axes=(0,))


def _stored(pool: list[mx.array], pages: Sequence[int | None], new: list[mx.array]) -> list[mx.array]:
    for start, stop in _runs(pages):
        place = mx.array([pages[start]])
        pool = [mx.slice_update(a, full[:, start:stop], place, axes=(1,)) for a, full in zip(pool, new, strict=True)]
    return pool


def _write(pages: mx.array, slot: int, offset: int, values: mx.array) -> mx.array:
    return mx.slice_update(pages, values[None], mx.array([slot, offset]), axes=(0, 2))


def _runs(pages: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of consecutive ids."""
    start = 0
    for i in range(1, len(pages) + 1):
        last = pages[i - 1]
        if i == len(pages) or last is None or pages[i] != last + 1:
            if last is not None:
                yield start, i
            start = i


def _padded(array: mx.array, axis: int, size: int) -> mx.array:
    missing = size - array.shape[axis]
    if missing <= 0:
        return array
    shape = list(array.shape)
    shape[axis] = missing
    if missing == size:
        return mx.zeros(shape, array.dtype)
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=axis)
