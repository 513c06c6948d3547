"""Chooses an attention backend per layer; Metal kernels are trusted only after a trial on a small case on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx

from ... import kernels_cpu
from ...device import default_dtype, is_gpu
from ...errors import UnsupportedShapeError
from ..base import AttentionParams, AttentionSpec, LayerSpec, Segment
from ..kv_format import KVFormat, by_layers
from ..pages import AttentionGroup, PageTable
from ..store import LayerStore
from .native import AttentionBackend, NativeAttention
from .reference import PlainAttention

_NATIVE = NativeAttention()
_PLAIN = PlainAttention()


def attention_backend(store: LayerStore) -> AttentionBackend:
    """The backend for a layer. Layers with equal backends are prepared together in each step."""
    if kernels_cpu.in_use():
        return _NATIVE
    if not _has_gpu_kernels():
        return _PLAIN
    from .metal import METAL

    instead = why_unsupported(store.spec, store.dtype, store.format)
    return PlainAttention(instead) if instead else METAL


def fallback_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers do not use this device's kernels, and why."""
    ways = {
        index: backend.instead for index, backend in _ways(layers, kv, dtype) if isinstance(backend, PlainAttention) and backend.instead
    }
    return [f"attention of {line}: plain MLX instead" for line in by_layers(ways)]


def gpu_status() -> str:
    """Whether the GPU kernels work on this machine; empty where there is no GPU."""
    if not _has_gpu_kernels():
        return ""

    usual = AttentionSpec(8, 128, 128, query_heads=32)
    instead = why_unsupported(usual, default_dtype(), KVFormat(4, 4))
    return f"attention in plain MLX: {instead}" if instead else "attention by this project's kernels, which have passed their trial"


def attention_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers use which backend."""
    return by_layers({index: backend.name for index, backend in _ways(layers, kv, dtype)})


def _ways(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> Iterator[tuple[int, AttentionBackend]]:
    for index, spec in enumerate(layers):
        if isinstance(spec, AttentionSpec):
            yield index, attention_backend(LayerStore(spec, dtype, kv))


def _has_gpu_kernels() -> bool:
    """Imported only where there is a GPU: a process on the CPU starts faster."""
    if not is_gpu():
        return False
    from ...kernels_metal import executors

    return executors.available()


SWITCH = "MLXINFER_METAL_KERNELS"
_STEPS = (((0, 130), (1, 20)), ((0, 1), (1, 1)), ((1, 44), (0, 1)), ((0, 1), (1, 1)), ((1, 3), (0, 2)))
"""(sequence, tokens) of the segments of each trial step: prefill and decode, on sealed pages and open ones."""
_MOST_ERROR, _MEAN_ERROR = 0.1, 0.01
"""Relative to the largest answer. Wrong code gives answers unrelated to the right ones, so the bounds can be loose."""


def why_unsupported(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> str | None:
    """Why the kernels are not used for such layers; None where they are."""
    if os.environ.get(SWITCH) == "0":
        return f"Metal kernels are switched off by {SWITCH}=0"
    from ...kernels_metal.paged_attention.tiles import Shape, check_shape

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
    from .metal import MetalAttention

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
    """All steps' answers, flat, float32."""
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
        y, full = backend.begin(tuple(segments), group).heads(store, (q, k, v), AttentionParams(spec.key_dim**-0.5))
        mx.eval(y, store.open, [f.arrays for f in full.values()])
        store.grow(pages=8, first=2)
        for slot, pages in full.items():
            store.seal(group.extend(group.tables[slot], sum(s.filled for s in segments if s.slot == slot)), pages)
        found.append(y.astype(mx.float32).reshape(-1))
    return mx.concatenate(found)
