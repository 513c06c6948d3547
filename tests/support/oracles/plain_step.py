"""A simple cache, independent of the paged one: the whole history of each sequence, and masks made with plain operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxinfer.cache.attention.head_steps import ready_queries, separate
from mlxinfer.cache.base import AttentionParams, AttentionSpec, GivenRows, HeadSteps, LayerSpec, OpaqueSpec, RecurrentSpec, Segment

Update = Callable[[mx.array, tuple[mx.array, ...]], tuple[mx.array, tuple[mx.array, ...]]]


@dataclass
class PlainCache:
    """`state[slot, layer]` is (keys, values), recurrent states, or an opaque object; `past[slot]` counts tokens."""

    layers: tuple[LayerSpec, ...]
    state: dict[tuple[int, int], Any] = field(default_factory=dict)
    past: dict[int, int] = field(default_factory=dict)

    def step(
        self, parts: list[tuple[int, int]], totals: dict[int, int] | None = None, spans: tuple[tuple[int, int], ...] = ()
    ) -> PlainStep:
        """A step over `(slot, count)` parts, in that order; `totals` gives the known length of a sequence where it is longer. `spans` are
        those of every part."""
        segments, start = [], 0
        for slot, count in parts:
            past = self.past.get(slot, 0)
            total = max(past + count, (totals or {}).get(slot, 0))
            segments.append(Segment(slot, start, count, past, total, spans=spans))
            self.past[slot] = past + count
            start += count
        return PlainStep(self, tuple(segments))


class PlainStep:
    runs_blocks = False

    def __init__(self, cache: PlainCache, segments: tuple[Segment, ...]) -> None:
        self.cache = cache
        self.segments = segments
        self.given: GivenRows | None = None
        self.positions = mx.concatenate([mx.arange(s.past, s.past + s.count, dtype=mx.int32) for s in segments])

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        spec = self.cache.layers[layer]
        assert isinstance(spec, AttentionSpec)
        assert k.shape[1:] == (spec.kv_heads, spec.key_dim)
        assert v.shape[1:] == (spec.kv_heads, spec.value_dim)
        outputs = []
        for s in self.segments:
            rows = slice(s.start, s.start + s.count)
            keys, values = self._append(s, layer, k[rows], v[rows])
            outputs.append(_attend(q[rows], keys, values, s, spec, params))
        return mx.concatenate(outputs)

    def attend_again(self, layer: int, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        spec, outputs = self.cache.layers[layer], []
        assert isinstance(spec, AttentionSpec)
        assert spec.shared
        q = ready_queries(rows, spec, heads)
        for s in self.segments:
            keys, values = self.cache.state[s.slot, layer]
            outputs.append(_attend(q[s.start : s.start + s.count], keys, values, s, spec, params))
        y = mx.concatenate(outputs)
        return y.reshape(y.shape[0], -1)

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        spec = self.cache.layers[layer]
        assert isinstance(spec, AttentionSpec)
        y = self.attend(layer, *separate(rows, spec, heads), params)
        return y.reshape(y.shape[0], -1)

    def run_blocks(self, x: mx.array, blocks: Any, layers: Any, rotations: Any, recurrent: Any = (), given: Any = None) -> mx.array:
        raise AssertionError("there are no CPU kernels here")

    def _append(self, s: Segment, layer: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if s.past:
            old_k, old_v = self.cache.state[s.slot, layer]
            k, v = mx.concatenate([old_k, k]), mx.concatenate([old_v, v])
        self.cache.state[s.slot, layer] = (k, v)
        return k, v

    def recur(self, layer: int, inputs: mx.array, update: Update) -> mx.array:
        spec = self.cache.layers[layer]
        assert isinstance(spec, RecurrentSpec)
        outputs = []
        for s in self.segments:
            states = self.cache.state.get((s.slot, layer)) or tuple(mx.zeros((1, *shape)) for shape in spec.shapes)
            y, states = update(inputs[None, s.start : s.start + s.count], states)
            assert [tuple(state.shape[1:]) for state in states] == list(spec.shapes)
            assert all(state.dtype == mx.float32 for state in states)
            self.cache.state[s.slot, layer] = states
            outputs.append(y[0])
        return mx.concatenate(outputs)

    def opaque(self, segment: Segment) -> Any:
        spec = self.cache.layers[0]
        assert isinstance(spec, OpaqueSpec)
        return self.cache.state.setdefault((segment.slot, 0), spec.make())


def _attend(q: mx.array, k: mx.array, v: mx.array, segment: Segment, spec: AttentionSpec, params: AttentionParams) -> mx.array:
    softcap, sinks, window = params.softcap, params.sinks, spec.window
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = mx.einsum("thd,shd->hts", q, k).astype(mx.float32) * params.scale
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    query, key = mx.arange(segment.past, segment.past + q.shape[0])[:, None], mx.arange(k.shape[0])[None]
    seen, together = key <= query, query < 0
    for first, end in segment.spans if spec.sees_spans else ():
        together = together | ((query >= first) & (query < end) & (key >= first) & (key < end))
    seen = seen | together
    if window is not None:
        seen = seen & ((key > query - window) | (together if spec.whole_spans else query < 0))
    if spec.skips_first:
        seen = seen & ((key > 0) | (query == 0))
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (*scores.shape[:2], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    shares = mx.softmax(scores, axis=-1)[..., : k.shape[0]].astype(v.dtype)
    return mx.einsum("hts,shd->thd", shares, v)
