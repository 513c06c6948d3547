"""Attention over pages in plain MLX: runs on every device, and is the reference for the other backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ...kernels_metal.paged_attention.reference import attention
from ..base import PAGE, AttentionParams, AttentionSpec, HeadSteps, Segment
from ..pages import AttentionGroup
from ..store import LayerStore, Pages
from .native import Full, StepAttention


def separate(rows: Sequence[mx.array], spec: AttentionSpec, heads: HeadSteps) -> tuple[mx.array, mx.array, mx.array]:
    """Turn the arguments of `Step.attend_rows` into those of `Step.attend`: queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]` and values
    `[T, Hkv, Dv]`."""
    count, kv, dim = rows[0].shape[0], spec.kv_heads, spec.key_dim
    keys, values = kv * dim, kv * spec.value_dim
    queries = sum(piece.shape[1] for piece in rows) - keys - values
    if heads.q_norm is None and heads.k_norm is None and rows[0].shape[1] >= queries + keys:
        turned, *rest = _cut(rows, [queries + keys, values])
        turned = _rotated(turned.reshape(count, -1, dim), heads)
        q, k = mx.split(turned, [queries // dim], axis=1)
        return q, k, rest[0].reshape(count, kv, -1)
    flat_q, flat_k, flat_v = _cut(rows, [queries, keys, values])
    q, k = flat_q.reshape(count, -1, dim), flat_k.reshape(count, kv, dim)
    q, k = (x if norm is None else norm(x) for x, norm in ((q, heads.q_norm), (k, heads.k_norm)))
    return _rotated(q, heads), _rotated(k, heads), flat_v.reshape(count, kv, -1)


def _rotated(x: mx.array, heads: HeadSteps) -> mx.array:
    return x if heads.rotation is None else heads.rotation(x)


def _cut(rows: Sequence[mx.array], sizes: list[int]) -> list[mx.array]:
    """Split the pieces at the ends of consecutive parts of these `sizes`."""
    parts: list[mx.array] = []
    left = iter(sizes)
    for piece in rows:
        ends = [next(left)]
        while ends[-1] < piece.shape[1]:
            ends.append(ends[-1] + next(left))
        parts += mx.split(piece, ends[:-1], axis=-1) if len(ends) > 1 else [piece]
    return parts


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """Gathers each sequence's keys and values and attends with MLX's own operation."""

    instead: str = ""
    """Why no kernel is used, where that deserves a message; otherwise empty."""

    @property
    def name(self) -> str:
        return f"plain MLX ({self.instead})" if self.instead else "plain MLX"

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        return PlainStep(segments, group)


@dataclass(frozen=True, slots=True)
class PlainStep:
    """`StepAttention` in plain MLX."""

    segments: tuple[Segment, ...]
    """The segments to attend for."""
    group: AttentionGroup
    """The layers with one window size, with their page tables."""
    _masks: dict[int, mx.array] = field(default_factory=dict)
    """By slot: layers with one window share them."""

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        y, full = self.heads(store, separate(rows, store.spec, heads), params)
        return y.reshape(y.shape[0], -1), full

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        q, k, v = qkv
        outputs: list[mx.array] = []
        full: Full = {}
        for s in self.segments:
            rows = slice(s.start, s.start + s.count)
            sealed = self.group.tables[s.slot].end
            tails = store.append(s.slot, s.past - sealed, [k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)])
            if s.filled:
                full[s.slot] = store.filled([t[:, : s.filled] for t in tails], starts=not sealed)
            out = self._attend(store, s, q[rows].swapaxes(0, 1), (tails[0], tails[1]), full, params)
            outputs.append(out.swapaxes(0, 1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), full

    def _attend(self, store: LayerStore, segment: Segment, q: mx.array, tails: Pages, full: Full, params: AttentionParams) -> mx.array:
        """Answer queries `[Hq, L, D]`: they see earlier pages as sealed, their own page unquantized. Where sealing loses nothing, or all
        queries are in one page, that is plain causal attention."""
        window, last = self.group.window, segment.past + segment.count
        oldest = 0 if window is None else max(segment.past - window + 1, 0)
        start, pages = self.group.tables[segment.slot].from_position(oldest)
        pieces = store.past(pages, since=q)
        mask = None
        if store.format.quantized and segment.past // PAGE != (last - 1) // PAGE:
            pieces += store.unsealed(full[segment.slot])
            mask = self.mask(segment, start)
        parts = [*pieces, tails]
        size = sum(keys.shape[1] for keys, _ in pieces) * PAGE + last - segment.past // PAGE * PAGE
        skipped = 0 if mask is not None else max(oldest - start, 0)
        k, v = (_joined([part[i] for part in parts])[:, skipped:size] for i in (0, 1))
        return attention(q, k, v, scale=params.scale, window=window, softcap=params.softcap, sinks=params.sinks, mask=mask)

    def mask(self, segment: Segment, start: int) -> mx.array:
        """Which keys a query sees, bool `[L, S]`: sealed ones from position `start` to the last full page, then raw ones from the page that
        was open."""
        if segment.slot not in self._masks:
            first = segment.past // PAGE * PAGE
            last = segment.past + segment.count
            sealed = mx.arange(start, first + segment.filled * PAGE, dtype=mx.int32)[None]
            raw = mx.arange(first, last, dtype=mx.int32)[None]
            queries = mx.arange(segment.past, last, dtype=mx.int32)[:, None]
            own = queries // PAGE * PAGE
            seen = mx.concatenate([sealed < own, (raw >= own) & (raw <= queries)], axis=1)
            if self.group.window is not None:
                seen &= mx.concatenate([sealed, raw], axis=1) > queries - self.group.window
            self._masks[segment.slot] = seen
        return self._masks[segment.slot]


def _joined(pages: list[mx.array]) -> mx.array:
    """Pages `[Hkv, n, 64, D]` to rows `[Hkv, n * 64, D]`."""
    whole = pages[0] if len(pages) == 1 else mx.concatenate(pages, axis=1)
    return mx.flatten(whole, 1, 2)
