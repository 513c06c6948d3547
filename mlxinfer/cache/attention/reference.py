"""Attention over pages in plain MLX: runs on every device, and is the reference for the other backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, field, replace
from functools import partial
from typing import Union

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...kernels_metal.paged_attention.reference import attention
from ...util.dataclass import dataclass
from ..base import PAGE, AttentionParams, HeadSteps, Segment
from ..pages import AttentionGroup
from ..store import ALL, Filled, LayerStore, Pages, part_of
from .head_steps import ready_queries, separate
from .native import Full, StepAttention
from .reference_chunks import LONG_BYTES, heads_at_once, is_fused, rows_at_once


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """Gathers each sequence's keys and values and attends with MLX's own operation."""

    instead: str = ""
    """Reason why no kernel is used, if users should know it; otherwise ""."""
    faster: bool = False
    """True if that reason is a measurement: this backend is the faster one."""

    @property
    def name(self) -> str:
        return f"plain MLX ({self.instead})" if self.instead else "plain MLX"

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        return PlainStep(segments, group)

    def joins_past(self, store: LayerStore) -> bool:
        return True

    def unsealed_bytes(self, store: LayerStore, rows: int) -> int:
        return 0  # `PlainSize` counts what it dequantizes


@dataclass(frozen=True, slots=True)
class PlainStep:
    """`StepAttention` in plain MLX."""

    segments: tuple[Segment, ...]
    group: AttentionGroup
    """Page tables of the layers with one window size."""
    kernels: bool = False
    """True if the CPU kernels may attend within spans."""
    _masks: dict[tuple[int, bool, bool], mx.array] = field(default_factory=dict)
    """By slot, `AttentionSpec.sees_spans` and `whole_spans`, shared by layers with one window."""
    _seen: dict[LayerStore, list[Attended]] = field(default_factory=dict)
    """Keys and values seen by the segments, of layers whose pages other layers also read."""

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
            attended = self.attended(store, s, (tails[0], tails[1]), full)
            if store.spec.shared:
                self._seen.setdefault(store, []).append(attended)
            since = outputs[-1] if outputs and attended.bytes > LONG_BYTES else None
            outputs.append(attended.answers(q[rows].swapaxes(0, 1), params, since).swapaxes(0, 1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), full

    def again(self, store: LayerStore, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """See `base.Step.attend_again`."""
        q = ready_queries(rows, store.spec, heads)
        if store not in self._seen:
            self._seen[store] = [self._past(store, s) for s in self.segments]
        outputs: list[mx.array] = []
        for s, attended in zip(self.segments, self._seen[store], strict=True):
            since = outputs[-1] if outputs and attended.bytes > LONG_BYTES else None
            outputs.append(attended.answers(q[s.start : s.start + s.count].swapaxes(0, 1), params, since).swapaxes(0, 1))
        return joined_rows(outputs)

    def attended(self, store: LayerStore, segment: Segment, tails: Pages, full: Full) -> Attended:
        """Return the keys and values that a segment's queries see: earlier pages as sealed, their own page unquantized. If sealing loses
        nothing, or all queries are in one page, this is plain attention, causal outside of spans.

        For the queries of a span, everything from the page with the span's first row is unquantized. A span is whole in its step, so what
        its queries see does not depend on chunks.
        """
        window, last = self.group.window, segment.past + segment.count
        oldest = 0 if window is None else max(segment.past - window + 1, 0)
        start, pages = self.group.tables[segment.slot].from_position(oldest)
        sees = store.spec.sees_spans and segment.spans != ()
        masked = store.format.quantized and segment.past // PAGE != (last - 1) // PAGE
        if masked and sees and segment.spans[0] == (segment.past, last):
            masked = False  # all rows see the same pages
        count = (len(pages) + (segment.filled if masked else 0)) * PAGE + last - segment.past // PAGE * PAGE
        hidden = int(store.spec.skips_first and not start)
        mask = _after_first(last) if hidden and not segment.past else None
        if masked:
            mask = self.mask(segment, start, spans=sees, whole=store.spec.whole_spans)
        return Attended(
            store,
            pages,
            full[segment.slot] if masked else None,
            tails,
            keys=slice(0 if mask is not None else max(oldest - start, hidden), count),
            window=window,
            mask=_without_first(mask, segment.past) if masked and hidden and mask is not None else mask,
            spans=[(first - segment.past, end - segment.past) for first, end in segment.spans] if sees else [],
            kernels=self.kernels,
        )

    def _past(self, store: LayerStore, segment: Segment) -> Attended:
        """Return the keys and values before the one query of a segment: full pages as sealed, and the open page. Nothing is appended."""
        table, window = self.group.tables[segment.slot], self.group.window
        oldest = 0 if window is None else max(segment.past - window + 1, 0)
        start, pages = table.from_position(oldest)
        tails = [a[segment.slot][:, None] for a in store.open]
        joined = (tails[0], store.values_of(tails[0]) if store.keys_alone else tails[1])
        return Attended(store, pages, None, joined, keys=slice(oldest - start, segment.past - start), window=None, mask=None, spans=[])

    def mask(self, segment: Segment, start: int, *, spans: bool = False, whole: bool = False) -> mx.array:
        """Return the mask of keys that queries see, bool `[L, S]`: sealed ones from position `start` to the last full page, then raw ones
        from the page that was open. With `spans`, the rows of a span see one another; `whole` as `AttentionSpec.whole_spans`."""
        key = segment.slot, spans, whole
        if key not in self._masks:
            first = segment.past // PAGE * PAGE
            last = segment.past + segment.count
            sealed = mx.arange(start, first + segment.filled * PAGE, dtype=mx.int32)[None]
            raw = mx.arange(first, last, dtype=mx.int32)[None]
            queries = mx.arange(segment.past, last, dtype=mx.int32)[:, None]
            own, newest, span = _with_spans(segment) if spans else (queries // PAGE * PAGE, queries, queries)
            seen = mx.concatenate([sealed < own, (raw >= own) & (raw <= newest)], axis=1)
            if self.group.window is not None:
                oldest = queries - self.group.window + 1
                seen &= mx.concatenate([sealed, raw], axis=1) >= (mx.minimum(oldest, span) if whole else oldest)
            self._masks[key] = seen
        return self._masks[key]


def joined_rows(answers: Sequence[mx.array]) -> mx.array:
    """Join the answers of segments, `[L, Hq, Dv]` each, to `[T, Hq * Dv]`."""
    y = answers[0] if len(answers) == 1 else mx.concatenate(list(answers))
    return y.reshape(y.shape[0], -1)


def _with_spans(segment: Segment) -> tuple[mx.array, mx.array, mx.array]:
    """Return, for each row, the first position that it sees unquantized, the last one that it sees, and the first one of its span, int32
    `[L, 1]` each. A row outside of all spans is one of its own."""
    first = np.arange(segment.past, segment.past + segment.count, dtype=np.int32)
    newest = first.copy()
    for start, end in segment.spans:
        rows = slice(start - segment.past, end - segment.past)
        first[rows], newest[rows] = start, end - 1
    own = first // PAGE * PAGE
    return mx.array(own)[:, None], mx.array(newest)[:, None], mx.array(first)[:, None]


def _after_first(count: int) -> mx.array:
    """Return a causal mask for a sequence's first tokens, bool `[count, count]`. Only the first token sees the first."""
    rows = mx.arange(count)
    return (rows[None] <= rows[:, None]) & ((rows[None] > 0) | (rows[:, None] == 0))


def _without_first(mask: mx.array, past: int) -> mx.array:
    """Hide the sequence's first token from later queries in a mask, bool `[L, S]`. It is the first key and, if `past` is 0, also the first
    one of the open page."""
    rows, keys = mx.arange(past, past + mask.shape[0])[:, None], mx.arange(mask.shape[1])[None]
    first = (keys == 0) | (keys == mask.shape[1] - mask.shape[0]) if not past else keys == 0
    return mask & (~first | (rows == 0))


@dataclass(frozen=True, slots=True)
class Attended:
    """The keys and values that the queries of a segment see."""

    store: LayerStore
    pages: list[int]
    fresh: Filled | None
    """Pages that become full in this step, if queries see them sealed too."""
    tails: Pages
    """Keys and values after the pages that were sealed before the step."""
    _: KW_ONLY
    keys: slice
    """Range of these tokens that queries see."""
    window: int | None
    """Tokens that a query attends to; None: all."""
    mask: mx.array | None
    """bool `[L, S]`; None: causal, but for `spans`."""
    spans: list[tuple[int, int]]
    """Ranges [first, end) of queries that see one another. The window limits only their past."""
    kernels: bool = False
    """See `PlainStep`."""

    @property
    def count(self) -> int:
        """Number of keys that queries see."""
        return int(self.keys.stop - self.keys.start)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that queries see, in the compute dtype."""
        spec = self.store.spec
        return spec.kv_heads * (spec.key_dim + spec.value_dim) * self.count * self.store.dtype.size

    def answers(self, q: mx.array, params: AttentionParams, since: mx.array | None) -> mx.array:
        """Answer queries `[Hq, L, Dk]`: `[Hq, L, Dv]`.

        A long past is copied for a few KV heads at a time, after `since` and one by one. MLX would otherwise copy it for all of them before
        it attends to any.
        """
        store, rows = self.store, q.shape[1]
        fused = is_fused(store.spec, rows, softcap=params.softcap is not None)
        group = q.shape[0] // store.spec.kv_heads
        heads = heads_at_once(store.spec, q.shape[0], rows, self.count, store.dtype.size, fused=fused)
        if since is None and store.format.quantized:
            since = q
        if heads == store.spec.kv_heads:
            return self._in_rows(q, *self._joined(ALL, since), params, fused=fused)
        outputs: list[mx.array] = []
        for first in range(0, store.spec.kv_heads, heads):
            chosen, own = slice(first, first + heads), slice(first * group, (first + heads) * group)
            k, v = self._joined(chosen, outputs[-1] if outputs else since)
            sinks = None if params.sinks is None else params.sinks[own]
            outputs.append(self._in_rows(q[own], k, v, replace(params, sinks=sinks), fused=fused))
        return mx.concatenate(outputs)

    def _joined(self, heads: slice, since: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return keys and values of these KV heads, `[H, S, D]` each."""
        pieces = self.store.past(self.pages, since, heads)
        if self.fresh is not None:
            pieces += self.store.unsealed(self.fresh, heads)
        keys, values = zip(*pieces, tuple(part_of(a, heads) for a in self.tails), strict=True)
        whole = _joined(keys)[:, self.keys]
        return whole, self.store.values_of(whole) if self.store.keys_alone else _joined(values)[:, self.keys]

    def _in_rows(self, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams, *, fused: bool) -> mx.array:
        """Attend with the queries of some heads, as many rows at a time as their scores allow."""
        rows, keys = q.shape[1], k.shape[1]
        count = rows_at_once(q.shape[0], rows, keys, fused=fused)
        outputs: list[mx.array] = []
        spans = self.spans if self.mask is None else ()
        parts: Iterable[_Part] = _parts(rows, count, spans) if spans or count < rows else [(0, rows, None)]
        for start, end, span in parts:
            part = q if end - start == rows else q[:, start:end]
            if outputs:
                (part,) = mx.depends([part], [outputs[-1]])
            oldest, newest, mask = 0, keys, self.mask
            if mask is not None:
                mask = mask if end - start == rows else mask[start:end]
            elif span is None:
                newest -= rows - end
            else:
                newest -= rows - span[1]
                oldest, mask = self._past_of_span(keys - rows + start, keys - rows + end, keys - rows + span[0], newest)
            own = (k, v) if newest - oldest == keys else (k[:, oldest:newest], v[:, oldest:newest])
            if self.kernels and span is not None and mask is None and _runs_natively(part, *own, params):
                outputs.append(_native(part, *own, params.scale))
                continue
            how = partial(attention, scale=params.scale, window=self.window, softcap=params.softcap, sinks=params.sinks, mask=mask)
            outputs.append(how(part, *own, causal=span is None))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)

    def _past_of_span(self, first: int, end: int, start: int, newest: int) -> tuple[int, mx.array | None]:
        """Return the first key that rows [first, end) of a span see, and their mask of the keys from there to `newest`; the span begins at
        key `start`."""
        if self.window is None or end <= self.window:
            return 0, None
        oldest, whole = max(first - self.window + 1, 0), self.store.spec.whole_spans
        oldest = min(oldest, start) if whole else oldest
        keys = mx.arange(oldest, newest)[None]
        seen = keys > mx.arange(first, end)[:, None] - self.window
        return oldest, seen | (keys >= start) if whole else seen


_Part = tuple[int, int, Union[tuple[int, int], None]]
"""Queries [start, end), and the span [first, end) that they are in; None outside of spans."""


def _parts(rows: int, most: int, spans: Sequence[tuple[int, int]]) -> Iterable[_Part]:
    """Divide queries into spans and text, and these into at most `most` queries each."""
    past = 0
    for first, last in (*spans, (rows, rows)):
        yield from ((start, min(start + most, first), None) for start in range(past, first, most))
        yield from ((start, min(start + most, last), (first, last)) for start in range(first, last, most))
        past = last


_MOST_PADDING = 16
"""Maximum ratio of keys to queries for the CPU kernel, which has as many queries as keys: MLX is some hundred times slower per score."""


def _runs_natively(q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> bool:
    """True if the CPU kernels' attention without a mask answers queries `[Hq, L, D]` over keys and values `[Hkv, S, D]`."""
    plain = params.softcap is None and params.sinks is None and k.shape == v.shape and q.dtype == k.dtype
    return plain and k.shape[1] <= _MOST_PADDING * q.shape[1] and kernels_cpu.can_compute_towers()


def _native(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    heads, rows, dim = q.shape
    missing = k.shape[1] - rows
    padded = mx.pad(q, [(0, 0), (0, missing), (0, 0)]) if missing else q
    queries, keys, values = (x.swapaxes(0, 1)[None] for x in (padded, k, v))
    return kernels_cpu.patch_attention(queries, keys, values, scale)[:rows].reshape(rows, heads, dim).swapaxes(0, 1)


def _joined(pages: Sequence[mx.array]) -> mx.array:
    """Join pages `[Hkv, n, 64, D]` to rows `[Hkv, n * 64, D]`."""
    whole = pages[0] if len(pages) == 1 else mx.concatenate(list(pages), axis=1)
    return mx.flatten(whole, 1, 2)
