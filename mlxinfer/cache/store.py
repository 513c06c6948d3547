"""Where keys and values lie: for one layer, a pool of sealed pages and the open page of each running sequence."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from .base import PAGE, AttentionSpec


class LayerStore:
    """Keys and values of one attention layer.

    `sealed` pages are `[Hkv, pages, PAGE, D]` and change only in `seal`, between two steps, when no step in flight refers to them:
    MLX then writes in place. `open` pages are `[slots, Hkv, PAGE, D]` and small: a step replaces them.
    """

    def __init__(self, spec: AttentionSpec, dtype: mx.Dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.sealed = [mx.zeros((spec.kv_heads, 0, PAGE, dim), dtype) for dim in (spec.key_dim, spec.value_dim)]
        self.open = [mx.zeros((0, spec.kv_heads, PAGE, dim), dtype) for dim in (spec.key_dim, spec.value_dim)]

    @property
    def arrays(self) -> list[mx.array]:
        return self.sealed + self.open

    @staticmethod
    def page_bytes(spec: AttentionSpec, dtype: mx.Dtype) -> int:
        return spec.kv_heads * PAGE * (spec.key_dim + spec.value_dim) * dtype.size

    def grow(self, pages: int, slots: int) -> None:
        """Make room for this many pages and slots; never shrinks."""
        self.sealed = [_padded(a, 1, pages) for a in self.sealed]
        self.open = [_padded(a, 0, slots) for a in self.open]

    def append(self, slot: int, offset: int, new: list[mx.array]) -> list[mx.array]:
        """Put `[Hkv, n, D]` keys and values behind the `offset` tokens of the open page, which then holds what is left after the
        last full page. Returns everything since the last sealed page, `[Hkv, offset + n, D]`."""
        tails = []
        for i, fresh in enumerate(new):
            length = offset + fresh.shape[1]
            if length <= PAGE:
                self.open[i] = _write(self.open[i], slot, offset, fresh)
                tails.append(self.open[i][slot, :, :length])
                continue
            tail = mx.concatenate([self.open[i][slot, :, :offset], fresh], axis=1) if offset else fresh
            rest = length % PAGE
            if rest:
                self.open[i] = _write(self.open[i], slot, 0, tail[:, -rest:])
            tails.append(tail)
        return tails

    def past(self, pages: list[int]) -> list[mx.array]:
        """The sealed keys and values of these pages in order, `[Hkv, pages * PAGE, D]`; a view where the ids are consecutive."""
        first, count = pages[0], len(pages)
        if pages == list(range(first, first + count)):
            chosen = [a[:, first : first + count] for a in self.sealed]
        else:
            index = mx.array(pages)
            chosen = [mx.take(a, index, axis=1) for a in self.sealed]
        return [a.reshape(a.shape[0], count * PAGE, a.shape[-1]) for a in chosen]

    def seal(self, pages: list[int], full: list[mx.array]) -> None:
        """Store full pages, `[Hkv, pages * PAGE, D]` keys and values, under these ids."""
        for i, values in enumerate(full):
            blocks = values.reshape(values.shape[0], len(pages), PAGE, values.shape[-1])
            for start, stop in _runs(pages):
                self.sealed[i] = mx.slice_update(self.sealed[i], blocks[:, start:stop], mx.array([pages[start]]), axes=(1,))

    def copy_open(self, source: int, target: int) -> None:
        self.open = [_write(a, target, 0, a[source]) for a in self.open]


def _write(pages: mx.array, slot: int, offset: int, values: mx.array) -> mx.array:
    return mx.slice_update(pages, values[None], mx.array([slot, offset]), axes=(0, 2))


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Where runs of consecutive ids begin and end."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, i
            start = i


def _padded(array: mx.array, axis: int, size: int) -> mx.array:
    missing = size - array.shape[axis]
    if missing <= 0:
        return array
    shape = list(array.shape)
    shape[axis] = missing
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=axis)
