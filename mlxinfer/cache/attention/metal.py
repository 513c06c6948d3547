"""Paged attention by the kernels of `kernels_metal`, which read sealed pages and store no scores in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

import mlx.core as mx

from ...kernels_metal.append_rows.launcher import Norm, append_rows, check_rows
from ...kernels_metal.append_rows.plan import AppendPlan, NewRows, plan_append
from ...kernels_metal.paged_attention.launcher import AppendLaunch, append_launch, check_pages, paged_attention_decode
from ...kernels_metal.paged_attention.plan import DecodePlan, Pools, SegmentRows, plan_decode
from ...kernels_metal.paged_attention.reference import attention
from ...kernels_metal.paged_attention.tiles import MOST_ROWS, Shape
from ...kernels_metal.paged_attention_prefill.launcher import paged_attention_prefill
from ...kernels_metal.paged_attention_prefill.plan import PrefillPlan, plan_prefill
from ...kernels_metal.seal_page.launcher import seal_keys, seal_values
from ...kernels_metal.unseal_pages.launcher import FILLED, FIRST, RAW, SEALED, plan_unseal, unseal_pages
from ...util.dataclass import dataclass
from ..base import PAGE, AttentionParams, HeadSteps, Segment
from ..kv_quantization import Sealing
from ..pages import AttentionGroup
from ..recent_rows import RecentRows, Spans
from ..store import Filled, LayerStore
from .apart import renumbered_segments, row_order
from .decode_layer import DecodeLayer, decode_layer, shape_of
from .head_steps import ready_queries, separate, with_bias
from .native import Full, StepAttention
from .prefill_choice import may_unseal, most_unsealed_bytes, unsealed_bytes
from .reference import PlainStep

Alike = tuple[int, int, tuple[int, int, int], int]
"""Key of layers with equal decode launches in a step: `DecodeLayer.kind`, rotation, pool sizes, append plan."""
_UNSEALED_AT_ONCE = 2
"""Maximum layers with a dequantized past: the one that attends, and the next."""


@dataclass(frozen=True, slots=True)
class MetalAttention:
    """Implements `AttentionBackend` with the kernels of `kernels_metal`."""

    prefill_lost: str = ""
    """Reason why no prefill kernel reads a quantized past, so that plain MLX answers large segments; "" if one does."""
    unseals: bool = True
    """True if a kernel may dequantize the past of large segments for MLX's attention."""

    @property
    def name(self) -> str:
        return f"Metal kernels; prompts in plain MLX ({self.prefill_lost})" if self.prefill_lost else "Metal kernels"

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        return MetalStep(segments, group, self)

    def joins_past(self, store: LayerStore) -> bool:
        """Return True for 16-bit pages, over which MLX's attention is fastest for large segments, where no kernel reads others, and for
        layers whose pages other layers also read."""
        return bool(self.prefill_lost) or store.spec.shared or not store.format.quantized

    def may_unseal(self, shape: Shape, tokens: int, rows: int, *, softcap: float | None) -> bool:
        """True if the past of a segment of `rows` rows that ends after `tokens` tokens is dequantized for MLX's attention."""
        return self.unseals and may_unseal(shape, tokens, rows, softcap=softcap, kernel=not self.prefill_lost)

    def unsealed_bytes(self, store: LayerStore, rows: int) -> int:
        shape = shape_of(store, store.spec.query_heads or store.spec.kv_heads)
        if not store.format.quantized or store.spec.shared or not self.may_unseal(shape, 0, rows, softcap=None):
            return 0
        most = most_unsealed_bytes()
        mask = rows * (most // unsealed_bytes(shape, 1) + 2 * rows)
        return _UNSEALED_AT_ONCE * most + mask


METAL = MetalAttention()


class MetalStep:
    """Runs segments of a few rows in one page by the decode kernel together, others by the prefill kernel, or by MLX's attention over
    16-bit pages."""

    def __init__(self, segments: tuple[Segment, ...], group: AttentionGroup, backend: MetalAttention = METAL) -> None:
        self.segments = segments
        self.group = group
        self._backend = backend
        few, self._many = _few_and_many_rows(segments)
        self._plain = PlainStep(tuple(self._many), group)
        self._row_order = row_order(segments, [*few, *self._many])
        self._few_rows = mx.array([s.start + i for s in few for i in range(s.count)], mx.int32) if few and self._many else None
        self._few = renumbered_segments(few)
        self._filling = [s for s in self._few if s.filled]
        self._last: tuple[Spans | None, AppendPlan | None] = None, None
        self._launches: dict[Alike, AppendLaunch | DecodePlan] = {}
        self._appends: dict[Spans, AppendPlan | None] = {}
        self._decode: dict[tuple[Shape, Pools, Spans], DecodePlan] = {}
        self._given = False
        self._prefill: dict[tuple[Shape, Pools, tuple[Segment, ...]], PrefillPlan] = {}

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        if self._many:
            y, full = self.heads(store, separate(rows, store.spec, heads), params)
            return y.reshape(y.shape[0], -1).astype(rows[0].dtype), full
        y, full = self._decoded(store, rows, heads, params)
        return y.astype(rows[0].dtype), full

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        kind = qkv[0].dtype
        q, k, v = (x.astype(store.dtype) for x in qkv)
        if self._many and store.spec.shared:
            y, filled = self._whole.heads(store, (q, k, v), params)
            return y.astype(kind), filled
        answers: list[mx.array] = []
        full: Full = {}
        before = list(store.open) if self._many else []
        if self._few:
            own = [x if self._few_rows is None else x[self._few_rows] for x in (q, k, v)]
            y, full = self._decoded(store, [x.reshape(x.shape[0], -1) for x in own], HeadSteps(), params)
            answers.append(y.reshape(y.shape[0], q.shape[1], -1))
        if self._many and self._reads_sealed(store, q.shape[1], params):
            tails = self._append_many(store, k, v, full)
            answers.append(self._attend_many(store, (q, k, v), before, tails, full, params))
        elif self._many:
            y, more = self._plain.heads(store, (q, k, v), params)
            answers.append(y)
            full.update(more)
        y = answers[0] if len(answers) == 1 else mx.concatenate(answers)
        return (y if self._row_order is None else y[self._row_order]).astype(kind), full

    @cached_property
    def _whole(self) -> PlainStep:
        """All segments in plain MLX: those of a step with large ones, in layers whose pages other layers also read."""
        return PlainStep(self.segments, self.group)

    def again(self, store: LayerStore, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """See `base.Step.attend_again`."""
        kind, spec, recent = rows.dtype, store.spec, store.recent
        rows = rows.astype(store.dtype)
        if self._many:
            return self._whole.again(store, rows, heads, params).astype(kind)
        plan = self._read_plan(store, shape_of(store, rows.shape[1] // spec.key_dim))
        norm, waves, q = None, None, ready_queries(rows, spec, HeadSteps())
        if plan.tile.staged_queries:
            norm = None if heads.q_norm is None else Norm(heads.q_norm.weight, heads.q_norm.eps)
            waves = None if heads.rotation is None else heads.rotation.waves
        else:
            q = ready_queries(rows, spec, heads)
        pools, scale, softcap, sinks = (store.sealed, store.first, store.kept), params.scale, params.softcap, params.sinks
        y = paged_attention_decode(
            q, *pools, plan, recent=recent.arrays, q_norm=norm, waves=waves, scale=scale, softcap=softcap, sinks=sinks
        )
        return y.reshape(y.shape[0], -1).astype(kind)

    def _read_plan(self, store: LayerStore, shape: Shape) -> DecodePlan:
        """Return the plan for pages and recent rows that have the step's own among them; usually that of the layer that appended them."""
        spans, length = store.recent.spans, store.recent.length
        key = shape, Pools(*store.sizes, len(spans), length), spans
        if key not in self._decode:
            self._refuse_if_given()
            rows = [self._rows(s, spans[i][1], i) if spans else self._rows(s) for i, s in enumerate(self._few)]
            self._decode[key] = plan_decode(shape, rows, key[1], query_rows=sum(s.count for s in self._few), window=self.group.window)
        return self._decode[key]

    def _decoded(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        """Append and attend with the rows of small segments. Returns `[T, Hq * Dv]`."""
        dtype = store.dtype
        if any(piece.dtype != dtype for piece in rows):
            rows, heads = [piece.astype(dtype) for piece in with_bias(rows, heads)], replace(heads, bias=None)
        layer, append = decode_layer(store, rows, heads, params), self._append_plan(store)
        key = layer.kind, id(heads.rotation), store.sizes, id(append)
        launch = self._launches.get(key) or self._launch(key, layer, append, store, rows, heads)
        old, pools = store.recent.arrays, (store.sealed, store.first, store.kept)
        if isinstance(launch, DecodePlan):
            q_norm, k_norm = layer.norms
            waves = None if heads.rotation is None else heads.rotation.waves
            steps: dict[str, Any] = {"bias": layer.bias, "q_norm": q_norm, "k_norm": k_norm, "waves": waves, "value_eps": layer.value_eps}
            q, recent = append_rows(layer.parts(rows), old, append, layer.shape, **steps)
            scale, softcap, sinks = params.scale, params.softcap, params.sinks
            y = paged_attention_decode(q, *pools, launch, recent=recent, scale=scale, softcap=softcap, sinks=sinks)
            y = y.reshape(y.shape[0], -1)
        else:
            y, recent = launch.run(layer.inputs(rows), old, *pools, layer.logits)
        store.recent = RecentRows(append.new, tuple(recent))
        return y, self._filled(store) if self._filling else {}

    def _launch(
        self, key: Alike, layer: DecodeLayer, append: AppendPlan, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps
    ) -> AppendLaunch | DecodePlan:
        """Return the launch of layers with this key: one that appends and attends, or only the attention's plan."""
        plan = self._decode_plan(store, layer.shape, append)
        way: AppendLaunch | DecodePlan = plan
        if plan.appends:
            (q_norm, k_norm), params, parts = layer.norms, layer.params, layer.parts(rows)
            waves = None if heads.rotation is None else heads.rotation.waves
            check_pages(store.sealed, store.first, store.kept, params.sinks, plan)
            check_rows(parts, store.recent.arrays, append, layer.shape, layer.bias, (q_norm, k_norm), waves)
            way = append_launch(
                parts,
                append,
                plan,
                scale=params.scale,
                has_bias=layer.bias is not None,
                q_norm=q_norm,
                k_norm=k_norm,
                waves=waves,
                value_eps=layer.value_eps,
                softcap=params.softcap,
                sinks=params.sinks,
            )
        self._launches[key] = way
        return way

    def _append_plan(self, store: LayerStore) -> AppendPlan:
        """Return the plan that appends this step's rows to the recent ones; too many recent rows are first written to their pages."""
        spans = store.recent.spans
        if spans is not self._last[0]:  # nearly all layers share the previous layer's
            self._last = spans, self._planned(spans, store.recent.length)
        plan = self._last[1]
        if plan is None:
            store.write_recent()
            plan = self._planned((), 0)
        assert plan
        return plan

    def _planned(self, spans: Spans, length: int) -> AppendPlan | None:
        if spans not in self._appends:
            self._refuse_if_given()
            self._appends[spans] = plan_append(spans, self.new_rows, rows=sum(s.count for s in self._few), old_length=length)
        return self._appends[spans]

    @property
    def new_rows(self) -> list[NewRows]:
        """Return the rows that small segments add to their open pages."""
        return [NewRows(s.slot, s.start, s.count, s.past % PAGE) for s in self._few]

    @property
    def shapes(self) -> list[Shape]:
        """Return the shapes of layers that attended with small segments."""
        return list(dict.fromkeys(shape for shape, _, _ in self._decode))

    def plan(self, shape: Shape, pools: Pools, append: AppendPlan) -> DecodePlan:
        """Return the rounded plan of layers with this shape, if all segments are small."""
        rows = [self._rows(s, append.new[i][1], i) for i, s in enumerate(self._few)]
        return plan_decode(shape, rows, pools, query_rows=append.rows, window=self.group.window, rounded=True)

    def _refuse_if_given(self) -> None:
        if self._given:
            raise RuntimeError("layers do not have what the step was planned for")

    def use(self, append: AppendPlan, plans: Iterable[DecodePlan]) -> None:
        """Use only these plans for all layers; their arrays may be a trace's."""
        self._given, self._last, self._launches = True, (None, None), {}
        self._appends = {append.old: append}
        self._decode = {(plan.shape, plan.pools, append.new): plan for plan in plans}

    def use_own(self) -> None:
        """Plan layers individually again."""
        self._given, self._last, self._launches = False, (None, None), {}
        self._appends, self._decode = {}, {}

    def _decode_plan(self, store: LayerStore, shape: Shape, append: AppendPlan) -> DecodePlan:
        key = shape, _pools(store, append), append.new
        if key not in self._decode:
            self._refuse_if_given()
            # The segments' entries are first.
            rows = [self._rows(s, append.new[i][1], i) for i, s in enumerate(self._few)]
            self._decode[key] = plan_decode(shape, rows, key[1], query_rows=append.rows, window=self.group.window)
        return self._decode[key]

    def _filled(self, store: LayerStore) -> Full:
        """Return pages filled by small segments."""
        full: Full = {}
        for s in self._filling:
            pages = [a[s.slot][:, None] for a in store.open]
            full[s.slot] = store.filled(pages, starts=s.past < PAGE, sealing=_SEALING)
        return full

    def _reads_sealed(self, store: LayerStore, heads: int, params: AttentionParams) -> bool:
        """True if kernels read the sealed pages of large segments: all of them, or those of all that are unsealed."""
        if not self._backend.joins_past(store):
            return True
        return store.format.quantized and all(self._unseals(shape_of(store, heads), params))

    def _unseals(self, shape: Shape, params: AttentionParams) -> list[bool]:
        """Return True for each large segment whose past is dequantized for MLX's attention."""
        return [self._backend.may_unseal(shape, s.past + s.count, s.count, softcap=params.softcap) for s in self._many]

    def _append_many(self, store: LayerStore, k: mx.array, v: mx.array, full: Full) -> list[list[mx.array]]:
        """Return keys and values of all pages since the last sealed one, per large segment."""
        found = []
        for s in self._many:
            rows = slice(s.start, s.start + s.count)
            tails = store.append(s.slot, s.past % PAGE, [k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)])
            if s.filled:
                full[s.slot] = store.filled([t[:, : s.filled] for t in tails], starts=s.past < PAGE, sealing=_SEALING)
            found.append(tails)
        return found

    def _attend_many(
        self,
        store: LayerStore,
        qkv: tuple[mx.array, mx.array, mx.array],
        open_before: list[mx.array],
        tails: list[list[mx.array]],
        full: Full,
        params: AttentionParams,
    ) -> mx.array:
        """Attend with runs of segments by the kernel, and separately with segments whose past is dequantized for MLX's attention."""
        shape, answers = shape_of(store, qkv[0].shape[1]), []
        for unsealed, run in groupby(zip(self._many, tails, self._unseals(shape, params), strict=True), key=lambda each: each[2]):
            chosen = list(run)
            if not unsealed:
                answers.append(self._prefilled(store, tuple(s for s, _, _ in chosen), qkv, open_before, full, params))
                continue
            for s, raw, _ in chosen:
                q = qkv[0][s.start : s.start + s.count].swapaxes(0, 1)
                answers.append(_attend_unsealed(self._plain, store, s, q, raw, full.get(s.slot), params, shape).swapaxes(0, 1))
        return answers[0] if len(answers) == 1 else mx.concatenate(answers)

    def _prefilled(
        self,
        store: LayerStore,
        segments: tuple[Segment, ...],
        qkv: tuple[mx.array, mx.array, mx.array],
        open_before: list[mx.array],
        full: Full,
        params: AttentionParams,
    ) -> mx.array:
        shape = shape_of(store, qkv[0].shape[1])
        key = shape, _pools(store), segments
        if key not in self._prefill:
            rows, first16 = [self._rows(s) for s in segments], bool(store.first)
            self._prefill[key] = plan_prefill(shape, rows, key[1], query_rows=qkv[0].shape[0], window=self.group.window, first16=first16)
        plan = self._prefill[key]
        filled = _joined_pages([full[s.slot] for s in segments if s.filled]) if plan.filled else []
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

    def _rows(self, s: Segment, kept: int = PAGE, recent: int = 0) -> SegmentRows:
        table = self.group.tables[s.slot]
        return SegmentRows(s.slot, s.start, s.count, s.past, table.pages, table.first, kept, recent)


def _attend_unsealed(
    step: PlainStep,
    store: LayerStore,
    segment: Segment,
    q: mx.array,
    tails: Sequence[mx.array],
    full: Filled | None,
    params: AttentionParams,
    shape: Shape,
) -> mx.array:
    """Answer queries `[Hq, L, D]` of a segment over several pages by MLX's attention: `[Hq, L, Dv]`. One launch dequantizes the past.

    `tails` are the keys and values of all pages since the last sealed one, `[Hkv, pages, 64, D]`; `full` the pages that the step filled.
    Queries see earlier pages as sealed, their own page as it is.
    """
    last = segment.past + segment.count
    oldest = 0 if step.group.window is None else max(segment.past - step.group.window + 1, 0)
    start, pages = step.group.tables[segment.slot].from_position(oldest)
    filled, first = (full.pages, full.first) if full else ([], [])
    # A first page that stays at 16 bits is the same in both forms.
    places = [(FIRST, ~p) if p < 0 else (SEALED, p) for p in pages] + [(RAW, 0)] * (1 if first else 0)
    places += [(FILLED, page) for page in range(segment.filled - (1 if first else 0))]
    places += [(RAW, page) for page in range(tails[0].shape[1])]
    counts = [arrays[0].shape[1] if arrays else 0 for arrays in (store.sealed, filled, store.first, tails)]
    plan = plan_unseal(places, (counts[0], counts[1], counts[2], counts[3]))
    k, v = unseal_pages(store.sealed, filled, store.first, tails, plan, shape, after=q)
    size = (len(pages) + segment.filled) * PAGE + last - segment.past // PAGE * PAGE
    mask = step.mask(segment, start)
    return attention(q, k[:, :size], v[:, :size], scale=params.scale, softcap=params.softcap, sinks=params.sinks, mask=mask)


def _few_and_many_rows(segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Split segments into those with a few rows in one page, and others."""
    few: list[Segment] = []
    many: list[Segment] = []
    for s in segments:
        (few if s.count <= MOST_ROWS and s.past // PAGE == (s.past + s.count - 1) // PAGE else many).append(s)
    return few, many


def _pools(store: LayerStore, append: AppendPlan | None = None) -> Pools:
    entries, length = (len(append.new), append.length) if append else (0, 0)
    return Pools(*store.sizes, entries, length)


def _joined_pages(full: Sequence[Filled]) -> list[mx.array]:
    parts = [f.pages for f in full]
    return parts[0] if len(parts) == 1 else [mx.concatenate(list(arrays), axis=1) for arrays in zip(*parts, strict=True)]


_SEALING = Sealing(seal_keys, seal_values)
