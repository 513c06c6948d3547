"""Whether the Metal kernels can be trusted with a kind of layer on this machine: tried on a small case before they are used."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import mlx.core as mx

from ..errors import UnsupportedShapeError
from ..kernels_metal.paged_attention.tiles import Shape, check_shape
from .attention import AttentionBackend, Options
from .base import AttentionSpec, Segment
from .format import KVFormat
from .metal import MetalAttention
from .pages import AttentionGroup, PageTable
from .plain import PlainAttention
from .store import LayerStore

SWITCH = "MLXINFER_METAL_KERNELS"
_STEPS = (((0, 130), (1, 20)), ((0, 1), (1, 1)), ((1, 44), (0, 1)), ((0, 1), (1, 1)), ((1, 3), (0, 2)))
"""(sequence, tokens) of the segments of each step: prefill and decode, on sealed pages and open ones."""
_MOST_ERROR, _MEAN_ERROR = 0.1, 0.01
"""Of the largest answer. Code that is wrong gives answers that have nothing to do with the right ones."""


def obstacle(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> str | None:
    """Why the kernels are not used for such layers; None where they are."""
    if os.environ.get(SWITCH) == "0":
        return f"Metal kernels are switched off by {SWITCH}=0"
    heads = spec.query_heads or spec.kv_heads
    try:
        check_shape(Shape(dtype, heads, spec.kv_heads, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits))
    except UnsupportedShapeError as error:
        return str(error)
    # The kernels depend on how many query heads share a KV head, not on how many KV heads there are.
    small = replace(spec, kv_heads=2, query_heads=2 * (heads // spec.kv_heads), window=None if spec.window is None else 70)
    return _tried(small, dtype, form)


@cache
def _tried(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> str | None:
    try:
        got, expected = (_answers(backend, spec, dtype, form) for backend in (MetalAttention(), PlainAttention()))
    except (RuntimeError, ValueError) as error:
        return f"the Metal kernels failed their trial: {' '.join(str(error).split())[:200]}"
    errors = mx.abs(got - expected) / mx.abs(expected).max()
    most, mean = float(errors.max().item()), float(errors.mean().item())  # type: ignore[arg-type]
    if most < _MOST_ERROR and mean < _MEAN_ERROR:
        return None
    return f"the Metal kernels failed their trial: answers differ from plain MLX by {most:.2g} of the largest"


def _answers(backend: AttentionBackend, spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> mx.array:
    """Of all steps, float32."""
    store, group = LayerStore(spec, dtype, form), AttentionGroup(spec.window, 8, first=form.first16)
    store.grow(slots=2)
    group.tables.update({0: PageTable(), 1: PageTable()})
    past, found = [0, 0], []
    for number, parts in enumerate(_STEPS):
        segments, start = [], 0
        for slot, count in parts:
            segments.append(Segment(slot, start, count, past[slot], 0))
            past[slot] += count
            start += count
        heads = (spec.query_heads, spec.kv_heads, spec.kv_heads)
        dims = (spec.key_dim, spec.key_dim, spec.value_dim)
        keys = mx.random.split(mx.random.key(number), 3)
        q, k, v = (mx.random.normal((start, h, d), key=key).astype(dtype) for h, d, key in zip(heads, dims, keys, strict=True))
        y, full = backend.begin(tuple(segments), group).heads(store, (q, k, v), Options(spec.key_dim**-0.5))
        mx.eval(y, store.open, [f.arrays for f in full.values()])
        store.grow(pages=8, first=2)
        for slot, pages in full.items():
            store.seal(group.extend(group.tables[slot], sum(s.filled for s in segments if s.slot == slot)), pages)
        found.append(y.astype(mx.float32).reshape(-1))
    return mx.concatenate(found)
