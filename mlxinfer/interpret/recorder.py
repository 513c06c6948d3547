"""Records the activations of one sequence, chunk by chunk."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import mlx.core as mx

from ..cache.base import AttentionParams, AttentionSpec, Segment
from ..models.hooks import HEADS
from .places import ATTENTION, KV

Kept = list[tuple[int, mx.array]]
"""Arrays with the position of their first row."""


class Recorder:
    """A hook that changes nothing. Its sequence goes through the model alone. Implements `models.hooks.Hooks`."""

    def __init__(self, wanted: Mapping[str, Collection[int]]) -> None:
        """`wanted`: layers to record, by place."""
        self._wanted = {place: frozenset(layers) for place, layers in wanted.items()}
        self._rows: dict[tuple[str, int], Kept] = {}
        self._past: dict[int, list[mx.array]] = {}
        """Keys `[heads, T, dim]` so far, by layer."""
        self._new: list[mx.array] = []

    def wants(self, place: str, layer: int) -> bool:
        return layer in self._wanted.get(place, ())

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        self._keep(place, layer, x, segments[0].past)
        return x

    def attended(
        self, layer: int, qkv: Sequence[mx.array], params: AttentionParams, spec: AttentionSpec, segments: Sequence[Segment]
    ) -> None:
        (segment,) = segments
        if self.wants(KV, layer):
            self._keep(KV, layer, mx.concatenate([mx.flatten(x, 1) for x in qkv[1:]], axis=-1), segment.past)
        if self.wants(ATTENTION, layer):
            self._keep(ATTENTION, layer, self._pattern(layer, qkv[0], qkv[1], params, spec, segment), segment.past)

    def arrays(self) -> list[mx.array]:
        arrays, self._new = self._new, []
        return arrays

    def found(self, place: str, layer: int) -> mx.array:
        """All rows of a place, float32: `[T, ...]`, or `[heads, T, ...]` for heads and attention patterns."""
        rows = [array for _, array in self._rows[place, layer]]
        if place == ATTENTION:
            length = rows[-1].shape[-1]
            return mx.concatenate([_widened(array, length) for array in rows], axis=1)
        whole = mx.concatenate(rows)
        return whole.swapaxes(0, 1) if place == HEADS else whole

    def _keep(self, place: str, layer: int, x: mx.array, past: int) -> None:
        """Record rows. After a preemption, rows of the same positions replace earlier ones."""
        kept = self._rows.setdefault((place, layer), [])
        while kept and kept[-1][0] >= past:
            kept.pop()
        kept.append((past, x.astype(mx.float32)))
        self._new.append(kept[-1][1])

    def _pattern(self, layer: int, q: mx.array, k: mx.array, params: AttentionParams, spec: AttentionSpec, segment: Segment) -> mx.array:
        """Attention weights of t queries on each token, float32 `[heads, t, past + t]`."""
        past = segment.past
        before = [] if past == 0 else self._past[layer]
        keys = mx.concatenate([*before, k.astype(mx.float32).swapaxes(0, 1)], axis=1)
        self._past[layer] = [keys]
        self._new.append(keys)
        queries = q.astype(mx.float32).swapaxes(0, 1)
        keys = mx.repeat(keys, queries.shape[0] // keys.shape[0], axis=0)
        scores = (queries @ keys.swapaxes(-1, -2)) * params.scale
        if params.softcap is not None:
            scores = mx.tanh(scores / params.softcap) * params.softcap
        distance = mx.arange(past, past + q.shape[0])[:, None] - mx.arange(keys.shape[1])[None]
        reached = distance >= 0
        for first, end in segment.spans if spec.sees_spans else ():
            reached[first - past : end - past, first:end] = True
        if spec.window is not None:
            reached = reached & (distance < spec.window)
        scores = mx.where(reached, scores, -mx.inf)
        if params.sinks is not None:
            sinks = mx.broadcast_to(params.sinks.astype(mx.float32)[:, None, None], (*scores.shape[:2], 1))
            return mx.softmax(mx.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
        return mx.softmax(scores, axis=-1)


def _widened(pattern: mx.array, length: int) -> mx.array:
    """`[heads, t, s]` with zeros for later tokens: `[heads, t, length]`."""
    return mx.pad(pattern, [(0, 0), (0, 0), (0, length - pattern.shape[2])])
