"""Plain attention in chunks: the same answers as in one piece, and no more memory than planned."""

from __future__ import annotations

import gc
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support.processes.active_memory import active_memory

from mlxinfer.cache.attention import reference
from mlxinfer.cache.attention import reference_chunks as plain_parts
from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.reference_chunks import PlainSize
from mlxinfer.cache.base import PAGE, AttentionParams, AttentionSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.store import LayerStore

PLAIN = PlainAttention()


def fed(spec: AttentionSpec, kv: KVFormat, backend, chunks: list[list[tuple[int, int]]], params: AttentionParams, layers: int = 1):
    """A cache that was fed `(slot, tokens)` per step, and the answers of all steps. Layers depend on one another."""
    tokens = 4 * sum(count for parts in chunks for _, count in parts)
    cache = PagedCache([spec] * layers, dtype=mx.bfloat16, kv_cache_tokens=tokens, chunk=512, kv=kv, backend=lambda store: backend)
    slots = [cache.open() for _ in range(1 + max(slot for parts in chunks for slot, _ in parts))]
    past, answers = [0] * len(slots), []
    for number, parts in enumerate(chunks):
        segments, start = [], 0
        for slot, count in parts:
            segments.append(Segment(slots[slot], start, count, past[slot], past[slot] + count))
            past[slot] += count
            start += count
        step, x = cache.begin(segments), mx.zeros((start, spec.query_heads, spec.value_dim), mx.bfloat16)
        for layer in range(layers):
            heads = (spec.query_heads, spec.key_dim), (spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim)
            keys = mx.random.split(mx.random.key(number * layers + layer), 3)
            q, k, v = (mx.random.normal((start, *shape), key=key).astype(mx.bfloat16) for shape, key in zip(heads, keys, strict=True))
            x = step.attend(layer, q + 0 * x[..., :1], k, v, params)
        mx.eval(x, step.state)
        answers.append(np.array(x.astype(mx.float32)))
        cache.commit(step)
    return cache, answers


SCENES = {
    "plain": (AttentionSpec(4, 32, 32, query_heads=8), KVFormat(), {}),
    "quantized": (AttentionSpec(4, 32, 32, query_heads=8), KVFormat(8, 4), {}),
    "first page at 16 bits": (AttentionSpec(2, 64, 64, query_heads=8), KVFormat(4, 4, first16=True), {}),
    "window": (AttentionSpec(3, 32, 32, 150, query_heads=6), KVFormat(), {}),
    "quantized window": (AttentionSpec(3, 32, 32, 150, query_heads=6), KVFormat(8, 8), {}),
    "softcap": (AttentionSpec(2, 32, 16, query_heads=4), KVFormat(), {"softcap": 5.0}),
    "sinks": (AttentionSpec(4, 32, 32, query_heads=8), KVFormat(), {"sinks": mx.arange(8.0)}),
    "sinks and softcap": (AttentionSpec(4, 32, 32, query_heads=8), KVFormat(4, 4), {"sinks": mx.arange(8.0), "softcap": 5.0}),
}


STEPS = [[(0, 300)], [(0, 130), (1, 70)], [(1, 1), (0, 1)], [(0, 3), (1, 200)]]


@cache
def whole(name: str) -> list[np.ndarray]:
    """The answers of a scene, computed in one part."""
    spec, kv, extra = SCENES[name]
    return fed(spec, kv, PLAIN, STEPS, AttentionParams(0.2, **extra))[1]


@pytest.mark.long
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("joined", "scores"), [(1, 2**24), pytest.param(2**26, 40_000, marks=pytest.mark.slow), (20_000, 4_000)])
def test_the_answers_are_those_of_the_whole(monkeypatch, name, joined, scores):
    spec, kv, extra = SCENES[name]
    expected = whole(name)
    monkeypatch.setattr(plain_parts, "JOINED_BYTES", joined)
    monkeypatch.setattr(plain_parts, "MOST_SCORES", scores)
    monkeypatch.setattr(reference, "LONG_BYTES", joined // 16)
    _, parts = fed(spec, kv, PLAIN, STEPS, AttentionParams(0.2, **extra))
    for got, want in zip(parts, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=0.02, rtol=0.02)


def peak(spec: AttentionSpec, kv: KVFormat, backend, past: int, rows: int, params: AttentionParams, layers: int = 1) -> int:
    """Bytes that a step of `rows` rows after `past` tokens takes, besides the cache."""
    cache = PagedCache([spec] * layers, dtype=mx.float32, kv_cache_tokens=2 * past, chunk=past, kv=kv, backend=lambda store: backend)

    def begun(past: int, rows: int):
        heads = (spec.query_heads, spec.key_dim), (spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim)
        q, k, v = (mx.zeros((rows, *shape)) for shape in heads)
        mx.eval(q, k, v)
        step, x = cache.begin([Segment(0, 0, rows, past, past + rows)]), mx.zeros((1,))
        for layer in range(layers):
            x = step.attend(layer, q + 0 * x.reshape(-1)[:1], k, v, params)
        return step, x

    cache.open()
    step, _ = begun(0, past)
    mx.eval([f.arrays for f in step.full.values()])  # no answers are wanted
    cache.commit(step)
    del step, _
    gc.collect()
    mx.clear_cache()
    before = active_memory()
    mx.reset_peak_memory()
    _, x = begun(past, rows)
    mx.eval(x)
    return mx.get_peak_memory() - before


CASES = {
    "16 bits": (AttentionSpec(4, 64, 64, query_heads=8), KVFormat(), None),
    "quantized": (AttentionSpec(4, 64, 64, query_heads=8), KVFormat(4, 4), None),
    "softcap": (AttentionSpec(4, 64, 64, query_heads=8), KVFormat(), 30.0),
}
PAST, ROWS, FIXED = 4096, 128, 2**21


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("small", [False, True], ids=["whole", "in parts"])
def test_plain_attention_takes_what_is_counted(monkeypatch, name, small):
    if small:
        monkeypatch.setattr(plain_parts, "JOINED_BYTES", 2**21)
        monkeypatch.setattr(plain_parts, "MOST_SCORES", 2**18)
    spec, kv, softcap = CASES[name]
    counted = PlainSize(spec, ROWS, 4, kv.quantized, softcap is not None).bytes(PAST + ROWS, 1)
    taken = peak(spec, kv, PLAIN, PAST, ROWS, AttentionParams(0.2, softcap))
    assert taken <= counted + FIXED
    assert counted < 4 * taken + FIXED


class Fused:
    """Stands for MLX's fused kernel, which reads keys and values and writes no scores."""

    @staticmethod
    def attention(q, k, v, **settings):
        return mx.depends([q + 0], [k + k[:, :1], v + v[:, :1]])[0]


def test_what_the_metal_step_leaves_to_plain_mlx_is_counted(monkeypatch):
    """Segments of many rows at 16 bits, of which the kernels compute nothing: the past is joined."""
    monkeypatch.setattr(plain_parts, "is_gpu", lambda: True)
    monkeypatch.setattr(reference, "attention", Fused.attention)
    spec = AttentionSpec(8, 128, 128, query_heads=8)
    assert METAL.joins_past(LayerStore(spec, mx.float32))
    assert plain_parts.is_fused(spec, ROWS, softcap=False)
    counted = PlainSize(spec, ROWS, 4, False, False).bytes(PAST + ROWS, 1)
    taken = peak(spec, KVFormat(), METAL, PAST, ROWS, AttentionParams(0.2))
    past = (PAST + ROWS) * 8 * 256 * 4
    assert past < taken <= 2 * counted + FIXED  # the fake copies its input once more
    assert counted == 2 * (past + PAGE * 8 * 256 * 4)


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 4])
def test_mlx_waits_where_its_limit_is_reached(layers):
    """If memory is short, layers are not in memory together, though MLX runs ahead: `limit_memory` relies on it."""
    spec = AttentionSpec(8, 64, 64, query_heads=8)
    before = mx.set_memory_limit(active_memory())
    try:
        taken = peak(spec, KVFormat(), PLAIN, 2048, 64, AttentionParams(0.2), layers)
    finally:
        mx.set_memory_limit(before)
    one = PlainSize(spec, 64, 4, False, False).bytes(2048 + 64, 1)
    assert taken <= one + FIXED
