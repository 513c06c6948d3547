"""Attention over pages by the kernels of `kernels_metal`: pages are read in their sealed form, and scores never leave the chip."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...kernels_metal.paged_attention.launcher import paged_attention_decode
from ...kernels_metal.paged_attention.plan import DecodePlan, Pools, Rows, plan_decode
from ...kernels_metal.paged_attention.tiles import MOST_ROWS, Shape
from ...kernels_metal.paged_attention_prefill.launcher import paged_attention_prefill
from ...kernels_metal.paged_attention_prefill.plan import PrefillPlan, plan_prefill
from ...kernels_metal.seal_page.launcher import seal_keys, seal_values
from ..base import PAGE, AttentionParams, HeadSteps, Segment
from ..kv_format import KVFormat
from ..kv_quantization import Sealing
from ..pages import AttentionGroup
from ..store import Filled, LayerStore
from .native import Full, StepAttention
from .reference import PlainStep, separate

_Key = tuple[Shape, Pools]


class MetalAttention:
    """`AttentionBackend` with the kernels of `kernels_metal`."""

    name = "Metal kernels"

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        return MetalStep(segments, group)

    def joins_past(self, form: KVFormat) -> bool:
        """For segments of many rows in the plain format, to which MLX's own attention is the fastest."""
        return not form.quantized


METAL = MetalAttention()


class MetalStep:
    """Segments with a few rows in one page go to the decode kernel, all together; the others go to the prefill kernel, or to MLX's own
    attention where pages are not quantized."""

    def __init__(self, segments: tuple[Segment, ...], group: AttentionGroup) -> None:
        self.segments = segments
        self.group = group
        self._few = [s for s in segments if s.count <= MOST_ROWS and s.past // PAGE == (s.past + s.count - 1) // PAGE]
        self._many = [s for s in segments if s not in self._few]
        self._plain = PlainStep(tuple(self._many), group)
        self._order = _order(segments, [*self._few, *self._many])
        self._places = _Places(self._few)
        self._decode: dict[_Key, DecodePlan] = {}
        self._prefill: dict[_Key, PrefillPlan] = {}

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        y, full = self.heads(store, separate(rows, store.spec, heads), params)
        return y.reshape(y.shape[0], -1), full

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        kind = qkv[0].dtype
        q, k, v = (x.astype(store.dtype) for x in qkv)
        key = _key(store, q.shape[1])
        answers: list[mx.array] = []
        full: Full = {}
        before = list(store.open)
        if self._few:
            self._append_few(store, k, v, full)
            answers.append(self._decoded(store, key, q, params))
        if self._many and not METAL.joins_past(store.format):
            self._append_many(store, k, v, full)
            answers.append(self._prefilled(store, key, (q, k, v), before, full, params))
        elif self._many:
            y, more = self._plain.heads(store, (q, k, v), params)
            answers.append(y)
            full.update(more)
        y = answers[0] if len(answers) == 1 else mx.concatenate(answers)
        return (y if self._order is None else y[self._order]).astype(kind), full

    def _append_few(self, store: LayerStore, k: mx.array, v: mx.array, full: Full) -> None:
        store.open = [self._places.write(pages, rows) for pages, rows in zip(store.open, (k, v), strict=True)]
        for s in self._few:
            if s.filled:
                pages = [a[s.slot][:, None] for a in store.open]
                full[s.slot] = store.filled(pages, starts=s.past < PAGE, sealing=_SEALING)

    def _append_many(self, store: LayerStore, k: mx.array, v: mx.array, full: Full) -> None:
        for s in self._many:
            rows = slice(s.start, s.start + s.count)
            tails = store.append(s.slot, s.past % PAGE, [k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)])
            if s.filled:
                full[s.slot] = store.filled([t[:, : s.filled] for t in tails], starts=s.past < PAGE, sealing=_SEALING)

    def _decoded(self, store: LayerStore, key: _Key, q: mx.array, params: AttentionParams) -> mx.array:
        if key not in self._decode:
            rows = [self._rows(s) for s in self._few]
            self._decode[key] = plan_decode(key[0], rows, key[1], query_rows=q.shape[0], window=self.group.window)
        return paged_attention_decode(
            q,
            store.sealed,
            store.first,
            store.open,
            self._decode[key],
            scale=params.scale,
            softcap=params.softcap,
            sinks=params.sinks,
        )

    def _prefilled(
        self,
        store: LayerStore,
        key: _Key,
        qkv: tuple[mx.array, mx.array, mx.array],
        open_before: list[mx.array],
        full: Full,
        params: AttentionParams,
    ) -> mx.array:
        if key not in self._prefill:
            rows, first16 = [self._rows(s) for s in self._many], bool(store.first)
            self._prefill[key] = plan_prefill(key[0], rows, key[1], query_rows=qkv[0].shape[0], window=self.group.window, first16=first16)
        plan = self._prefill[key]
        filled = _joined([full[s.slot] for s in self._many if s.filled]) if plan.filled else []
        return paged_attention_prefill(
            *qkv,
            store.sealed,
            filled,
            store.first,
            open_before,
            plan,
            scale=params.scale,
            softcap=params.softcap,
            sinks=params.sinks,
        )

    def _rows(self, s: Segment) -> Rows:
        table = self.group.tables[s.slot]
        return Rows(s.slot, s.start, s.count, s.past, table.pages, table.first)


class _Places:
    """Where the rows of segments lie in the open pages: one write for all of them."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        each = [(s.start + i, s.slot, s.past % PAGE + i) for s in segments for i in range(s.count)]
        self._rows, self._slots, self._offsets = (mx.array([row[i] for row in each], mx.int32) for i in range(3))

    def write(self, pages: mx.array, rows: mx.array) -> mx.array:
        """Write rows `[T, Hkv, D]` into pages `[slots, Hkv, 64, D]`; returns the new pages."""
        heads = mx.arange(pages.shape[1])[None]
        written = mx.array(pages)
        written[self._slots[:, None], heads, self._offsets[:, None]] = rows[self._rows]
        return written


def _key(store: LayerStore, heads: int) -> _Key:
    spec, form = store.spec, store.format
    shape = Shape(store.dtype, heads, spec.kv_heads, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits)
    return shape, Pools(store.sealed[0].shape[1], store.first[0].shape[1] if store.first else 0, store.open[0].shape[0])


def _order(segments: Sequence[Segment], computed: Sequence[Segment]) -> mx.array | None:
    """Index that puts computed rows back into the step's order; None if they are in order."""
    if list(computed) == list(segments):
        return None
    starts, done = {}, 0
    for s in computed:
        starts[s.start], done = done, done + s.count
    return mx.array([starts[s.start] + i for s in segments for i in range(s.count)], mx.int32)


def _joined(full: Sequence[Filled]) -> list[mx.array]:
    parts = [f.pages for f in full]
    return parts[0] if len(parts) == 1 else [mx.concatenate(list(arrays), axis=1) for arrays in zip(*parts, strict=True)]


_SEALING = Sealing(seal_keys, seal_values)
