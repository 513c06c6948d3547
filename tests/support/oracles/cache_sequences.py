"""Sequences of random queries, keys and values for a cache, and what attention makes of them in each format."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from mlxinfer.cache.base import PAGE, AttentionParams, AttentionSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.kernels_metal.paged_attention.reference import attention

from . import sealed

PLAIN = KVFormat()
SPECS = (AttentionSpec(2, 8, 8, query_heads=6), AttentionSpec(2, 8, 8, 70, query_heads=2), AttentionSpec(1, 16, 4, 10, query_heads=3))
SCALE = 0.3


class Sequence:
    """Random queries, keys and values of one sequence, and what attention makes of them: earlier pages as they are kept, each query's
    own as it is."""

    def __init__(self, seed: int, length: int, kv: KVFormat = PLAIN, specs: Many[AttentionSpec] = SPECS):
        rng = np.random.default_rng(seed)
        self.length, self.done = length, 0
        self.inputs: list[list[mx.array]] = []
        self.expected: list[np.ndarray] = []
        for spec in specs:
            shapes = [
                (length, spec.query_heads, spec.key_dim),
                (length, spec.kv_heads, spec.key_dim),
                (length, spec.kv_heads, spec.value_dim),
            ]
            arrays = [mx.array(rng.standard_normal(s).astype(np.float32)) for s in shapes]
            self.inputs.append(arrays)
            q, k, v = (np.array(a.swapaxes(0, 1)) for a in arrays)
            form = kv.for_layer(spec)
            kept = [as_kept(k, sealed.restored_keys, form.k_bits, kv), as_kept(v, sealed.restored_values, form.v_bits, kv)]
            keys, values = (mx.array(np.concatenate(pair, axis=1)) for pair in zip(kept, (k, v), strict=True))
            rows = attention(mx.array(q), keys, values, scale=SCALE, mask=mx.array(seen(length, spec.window)))
            self.expected.append(np.array(rows.swapaxes(0, 1)))


def as_kept(x: np.ndarray, restore: Callable[[np.ndarray, int], np.ndarray], bits: int, kv: KVFormat) -> np.ndarray:
    """`[H, S, D]` as its full pages give it back."""
    kept, full = x.copy(), x.shape[1] // PAGE
    for page in range(int(kv.first16), full):
        rows = slice(page * PAGE, (page + 1) * PAGE)
        kept[:, rows] = restore(x[:, rows], bits)
    return kept


def seen(length: int, window: int | None) -> np.ndarray:
    """`[S, 2 * S]`: of keys as they are kept, and of keys as they are."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    near = (key <= query) & (key > query - (window or length))
    return np.concatenate([near & (key // PAGE < query // PAGE), near & (key // PAGE == query // PAGE)], axis=1)


def run_step(cache: PagedCache, parts: list[tuple[Sequence, int, int]]) -> None:
    """Advance (sequence, slot, count) together, checking every layer's rows."""
    segments, start = [], 0
    for sequence, slot, count in parts:
        segments.append(Segment(slot, start, count, sequence.done, sequence.length))
        start += count
    step = cache.begin(segments)
    assert step.positions.tolist() == [s.past + i for s in segments for i in range(s.count)]
    for layer in range(len(cache.layers)):
        rows = [mx.concatenate([s.inputs[layer][i][s.done : s.done + n] for s, _, n in parts]) for i in range(3)]
        got = np.array(step.attend(layer, *rows, AttentionParams(SCALE)))
        want = np.concatenate([s.expected[layer][s.done : s.done + n] for s, _, n in parts])
        np.testing.assert_allclose(got, want, atol=1e-5)
    for sequence, _, count in parts:
        sequence.done += count
    if step.needs_commit:
        mx.eval(step.state)
        cache.commit(step)
