"""Segments whose image rows see one another, beside others: the Metal kernels in the emulator against plain MLX."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import emulated

from mlxinfer.cache.attention.metal import METAL, MetalStep
from mlxinfer.cache.attention.native import AttentionBackend
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.base import AttentionParams, AttentionSpec, HeadSteps, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.store import LayerStore
from mlxinfer.nn.rope import make_rope

PLAIN = PlainAttention()
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
SPECS = (
    AttentionSpec(2, 64, 64, query_heads=6, sees_spans=True),
    AttentionSpec(1, 80, 64, 70, query_heads=2, sees_spans=True),
    AttentionSpec(1, 64, 64, 70, query_heads=2, sees_spans=True, whole_spans=True),
    AttentionSpec(1, 64, 128, 10, query_heads=4),
)
"""All see spans but the last."""
STEPS: tuple[tuple[tuple[int, int, bool], ...], ...] = (
    ((0, 5, False), (1, 40, False)),
    ((1, 1, False), (0, 90, True), (2, 3, False)),
    ((0, 20, True), (2, 100, False), (1, 1, False)),
    ((0, 3, False), (1, 30, True)),
    ((2, 9, True),),
    ((0, 1, False), (1, 1, False), (2, 1, False)),
)
"""(sequence, rows, True for an image) of the segments of each step."""


def answers(backend: Callable[[LayerStore], AttentionBackend], kv: KVFormat, *, raw: bool) -> list[np.ndarray]:
    """Answers of all layers in each step. `raw`: the layers norm and rotate heads themselves."""
    cache = PagedCache(SPECS, dtype=mx.float32, kv_cache_tokens=1 << 12, chunk=256, kv=kv, backend=backend)
    slots, past, found = [cache.open() for _ in range(3)], [0, 0, 0], []
    for number, parts in enumerate(STEPS):
        segments, start = [], 0
        for which, count, image in parts:
            spans = ((past[which], past[which] + count),) if image else ()
            segments.append(Segment(slots[which], start, count, past[which], 300, spans=spans))
            past[which] += count
            start += count
        step, rows = cache.begin(segments), []
        for layer, spec in enumerate(SPECS):
            keys = mx.random.split(mx.random.key(10 * number + layer), 3)
            sizes = ((spec.query_heads, spec.key_dim), (spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim))
            q, k, v = (mx.random.normal((start, *size), key=key) for size, key in zip(sizes, keys, strict=True))
            params = AttentionParams(spec.key_dim**-0.5)
            if raw:
                flat = [x.reshape(start, -1) for x in (q, k, v)]
                heads = HeadSteps(rotation=make_rope(ROPE, spec.key_dim, 1024).at(step))
                rows.append(step.attend_rows(layer, flat, heads, params))
            else:
                rows.append(step.attend(layer, q, k, v, params).reshape(start, -1))
        mx.eval(rows, step.state)
        if step.needs_commit:
            cache.commit(step)
        found += [np.array(each) for each in rows]
    return found


@pytest.mark.emulator
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kv", [KVFormat(), KVFormat(4, 4), pytest.param(KVFormat(8, 3, first16=True), marks=pytest.mark.long)], ids=str)
def test_the_kernels_answer_the_others(kv: KVFormat, raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[tuple[Segment, ...]] = []
    usual = MetalStep.__init__
    monkeypatch.setattr(MetalStep, "__init__", lambda self, segments, *more: (began.append(segments), usual(self, segments, *more))[1])
    expected = answers(lambda store: PLAIN, kv, raw=raw)
    with emulated():
        got = answers(lambda store: METAL, kv, raw=raw)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    assert {s.slot for s in began[4]} == {1, 2}, "the layers that see spans leave the image to plain MLX"
    assert any(s.spans for segments in began for s in segments), "the other layer's kernels attend to all rows"


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kv", [KVFormat(), KVFormat(4, 4)], ids=str)
def test_this_machine_answers_as_plain_mlx(kv: KVFormat, raw: bool) -> None:
    from mlxinfer.cache.attention.select import attention_backend

    for one, other in zip(answers(attention_backend, kv, raw=raw), answers(lambda store: PLAIN, kv, raw=raw), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
