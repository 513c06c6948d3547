"""Measures attention of one row by the decode kernel on a GPU, compared with MLX's attention to the same pages.

Plain MLX joins the pages of a sequence in each step. `on_joined_keys` leaves that out: it compares the kernel with MLX's attention alone,
over keys and values as mlx-lm stores them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx

from ...kernels_metal.executors import measurable
from ...kernels_metal.kernel_speed import compare
from ...kernels_metal.kernel_trial import Kind, Speed, Speeds, Verdict, unless_slower
from ...kernels_metal.paged_attention.launcher import paged_attention_decode
from ...kernels_metal.paged_attention.plan import Pools, SegmentRows, plan_decode
from ...kernels_metal.paged_attention.reference import attention
from ...kernels_metal.paged_attention.tiles import Shape
from ..base import PAGE, AttentionSpec
from ..kv_format import KVFormat
from ..store import LayerStore

TOKENS = 1024
"""Tokens of the measured sequence, fewer if the window is shorter."""
_OPEN = 32
"""Of these, tokens of the open page."""
_KV_HEADS = 8
_BYTES, _MOST_LAYERS = 64 << 20, 32
"""Bytes of all layers, more than a cache stores, and the maximum number of layers."""


def speeds(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> Speeds:
    """Return the speed of the kernel for one row, compared with plain MLX over the same pages: the `speeds` of the trial of decode."""
    case = _Case(spec, dtype, form)
    return {1: compare(case.by_kernel, case.by_mlx, case.queries, steps=len(case.layers), busy=True)}


def on_joined_keys(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> Speed | None:
    """Return the same, with keys and values that MLX finds joined; None if this process has no GPU."""
    if not measurable():
        return None
    case = _Case(spec, dtype, form)
    known = [case.joined(layer) for layer in case.layers]
    mx.eval(known)
    return compare(case.by_kernel, lambda q, number: case.attend(q, *known[number]), case.queries, steps=len(known), busy=True)


def choose(kind: Kind, found: Speeds, used: Collection[int]) -> Verdict:
    """Use the kernel unless plain MLX is faster: it also appends rows and rotates heads, which is not measured. Quantized pages need it in
    any case, since plain MLX would dequantize them in each step."""
    return Verdict(speeds=found) if kind[2].quantized else unless_slower(kind, found, used)


class _Case:
    """Layers with the pages of one sequence, and a row of queries. All numbers are zeros, which does not affect the time."""

    def __init__(self, spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> None:
        group = (spec.query_heads or spec.kv_heads) // spec.kv_heads
        spec = replace(spec, kv_heads=_KV_HEADS, query_heads=group * _KV_HEADS)
        self.shape = Shape(dtype, group * _KV_HEADS, _KV_HEADS, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits)
        tokens = TOKENS if spec.window is None else min(TOKENS, spec.window)
        self.pages = list(range(max(tokens - _OPEN, 0) // PAGE))
        self.layers = self._stores(spec, dtype, replace(form, first16=False))
        rows = [SegmentRows(0, 0, 1, len(self.pages) * PAGE + _OPEN - 1, self.pages)]
        self.plan = plan_decode(self.shape, rows, Pools(*self.layers[0].sizes), query_rows=1)
        self.queries = mx.zeros((1, self.shape.heads, spec.key_dim), dtype)
        mx.eval(self.queries, [store.arrays for store in self.layers])

    def _stores(self, spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> list[LayerStore]:
        size = LayerStore.page_bytes(spec, dtype, form) * max(len(self.pages), 1)
        stores = [LayerStore(spec, dtype, form) for _ in range(min(max(_BYTES // size, 1), _MOST_LAYERS))]
        for store in stores:
            store.grow(pages=max(len(self.pages), 1), slots=1)
        return stores

    def by_kernel(self, q: mx.array, number: int) -> mx.array:
        store = self.layers[number]
        return _next(q, paged_attention_decode(q, store.sealed, store.first, store.kept, self.plan, scale=1.0))

    def by_mlx(self, q: mx.array, number: int) -> mx.array:
        return self.attend(q, *self.joined(self.layers[number]))

    def joined(self, store: LayerStore) -> tuple[mx.array, mx.array]:
        """Return keys and values `[Hkv, S, D]` of a layer."""
        opened = [a[0, :, None] for a in store.kept]
        keys, values = zip(*store.past(self.pages), opened, strict=True)
        count = len(self.pages) * PAGE + _OPEN
        k, v = (mx.flatten(mx.concatenate(list(pages), axis=1), 1, 2)[:, :count] for pages in (keys, values))
        return k, v

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return _next(q, attention(q.swapaxes(0, 1), k, v, scale=1.0).swapaxes(0, 1))


def _next(q: mx.array, y: mx.array) -> mx.array:
    """Return the queries of the next layer, which depend on this one's answers."""
    return y if y.shape == q.shape else q + y[..., :1]
