"""Decode steps of one token per sequence as functions of arrays, which can be replayed (`engine/runner/compiled_step.py`).

The function maps the arrays of a step's plans and of the cache to the cache's new arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx

from ..kernels_metal.append_rows.plan import RECENT, AppendPlan, plan_append
from ..kernels_metal.paged_attention.plan import DecodePlan, Pools
from ..kernels_metal.paged_attention.tiles import Shape
from .attention.metal import MetalAttention, MetalStep
from .base import AttentionSpec
from .paged import PagedCache
from .recent_rows import RecentRows, Spans
from .step import CacheStep

_FEW_ROWS = 4
"""Below this number of sequences launches cost more than bytes, so recent rows are written to their pages half as often."""


class SteadyCache:
    """Parts of a cache that replayable steps read and write; all attention must use the Metal kernels."""

    def __init__(self, cache: PagedCache) -> None:
        self.stores = [store for store, _ in cache.attention]
        self.recurrent = cache.recurrent
        kernels = all(isinstance(backend, MetalAttention) for _, backend in cache.attention)
        self.possible = cache.can_fork and kernels and bool(self.stores or self.recurrent)
        """True if the cache supports replayable steps."""
        self._shapes: dict[int | None, list[Shape]] = {}

    def steady(self, step: CacheStep) -> SteadyStep | None:
        """Return the step as a replayable one; None if unsupported, or if layer shapes are unknown."""
        segments = step.segments
        if not self.possible or step.needs_commit or step.given is not None or any(s.count != 1 for s in segments):
            return None
        attends = list(dict.fromkeys(attend for _, attend in step.attention if isinstance(attend, MetalStep)))
        shapes = [self._shapes.get(attend.group.window) for attend in attends]
        slots = [s.slot for s in segments]
        if None in shapes or not all(store.together(slots) for store in self.recurrent):
            return None
        append, blank = self._append(attends, len(segments))
        if append is None:
            return None
        plans: list[tuple[MetalStep, DecodePlan]] = []
        for attend, known in zip(attends, shapes, strict=True):
            pools = self._pools(step, attend, append)
            plans += [(attend, attend.plan(shape, pools, append)) for shape in known or ()]
        return SteadyStep(self, tuple(slots), append, plans, blank)

    def learn(self, step: CacheStep) -> None:
        """Record the shapes of layers from a built step."""
        for _, attend in step.attention:
            if isinstance(attend, MetalStep) and attend.group.window not in self._shapes and attend.shapes:
                self._shapes[attend.group.window] = attend.shapes

    def _append(self, attends: Sequence[MetalStep], rows: int) -> tuple[AppendPlan | None, bool]:
        """Return (plan that appends rows, True if recent rows must be written first); None if layers differ."""
        if not attends:
            return AppendPlan((), (), 0, 0, rows, _nothing()), False
        length, recent, new = RECENT if rows < _FEW_ROWS else RECENT // 2, self.stores[0].recent, attends[0].new_rows
        spans = recent.spans
        for store in self.stores:
            other = store.recent.spans
            if other is not spans and other != spans:
                return None, False
        if recent.length == length and len(recent.spans) == rows:
            plan = plan_append(recent.spans, new, rows=rows, old_length=length, length=length)
            if plan is not None and len(plan.new) == rows:
                return plan, False
        empty: Spans = tuple((each.slot, each.at, each.at) for each in new)
        return plan_append(empty, new, rows=rows, old_length=length, length=length), True

    @staticmethod
    def _pools(step: CacheStep, attend: MetalStep, append: AppendPlan) -> Pools:
        store = next(store for store, each in step.attention if each is attend)
        return Pools(*store.sizes, len(append.new), append.length)


class SteadyStep:
    """A replayable step."""

    def __init__(
        self,
        cache: SteadyCache,
        slots: tuple[int, ...],
        append: AppendPlan,
        plans: list[tuple[MetalStep, DecodePlan]],
        blank: bool,
    ) -> None:
        """Create a step; with `blank`, recent rows must be written to their pages first."""
        self._cache, self._slots, self._append, self._plans, self._blank = cache, slots, append, plans, blank

    @property
    def key(self) -> Hashable:
        """Key that is equal for steps which differ only in arrays."""
        work = tuple((plan.items, plan.part_rows, plan.table.size, plan.tile, plan.shape, plan.pools) for _, plan in self._plans)
        return len(self._slots), self._append.length, work, tuple([store.sizes for store in self._cache.stores])

    @property
    def given(self) -> list[mx.array]:
        """Arrays that the host created for the step."""
        arrays = [self._append.entries]
        for _, plan in self._plans:
            arrays += [plan.work, plan.table] if plan.parts is None else [plan.work, plan.table, plan.parts]
        return arrays

    def begin(self) -> list[mx.array]:
        """Arrays of the cache, including recent rows."""
        if self._blank:
            for store in self._cache.stores:
                store.write_recent()
                store.recent = RecentRows(self._append.old, _blank(store.spec, store.dtype, len(self._slots), self._append.length))
        return self._held()

    def _held(self) -> list[mx.array]:
        held: list[mx.array] = []
        for store in self._cache.stores:
            held += store.sealed
            held += store.first
            held += store.kept
            held += store.recent.arrays
        for recurrent in self._cache.recurrent:
            held += recurrent.together(self._slots) or []
        return held

    def end(self, arrays: Sequence[mx.array]) -> None:
        """Store arrays returned by `left` in the cache."""
        rest = iter(arrays)
        for store in self._cache.stores:
            store.recent = RecentRows(self._append.new, (next(rest), next(rest)))
        for recurrent in self._cache.recurrent:
            recurrent.advance(self._slots, [next(rest) for _ in recurrent.shapes])

    def left(self) -> list[mx.array]:
        """Arrays that the step changed."""
        arrays = [a for store in self._cache.stores for a in store.recent.arrays]
        for recurrent in self._cache.recurrent:
            arrays += recurrent.together(self._slots) or []
        return arrays

    @contextmanager
    def reading(self, given: Sequence[mx.array], held: Sequence[mx.array]) -> Iterator[None]:
        """Let layers use these arrays, and plans those of `given`, inside of the block."""
        before = [(store.sealed, store.first, store.kept, store.recent) for store in self._cache.stores]
        states = [list(recurrent.together(self._slots) or []) for recurrent in self._cache.recurrent]
        try:
            self._use(given)
            self._fill(held)
            yield
        finally:
            for attend in dict.fromkeys(attend for attend, _ in self._plans):
                attend.use_own()  # after a failure the step is built normally
            for store, old_arrays in zip(self._cache.stores, before, strict=True):
                store.sealed, store.first, store.kept, store.recent = old_arrays
            for recurrent, old in zip(self._cache.recurrent, states, strict=True):
                recurrent.advance(self._slots, old)

    def _use(self, given: Sequence[mx.array]) -> None:
        rest = iter(given)
        append = replace(self._append, entries=next(rest))
        made: dict[MetalStep, list[DecodePlan]] = {}
        for attend, plan in self._plans:
            work, table, parts = next(rest), next(rest), None if plan.parts is None else next(rest)
            made.setdefault(attend, []).append(replace(plan, work=work, table=table, parts=parts))
        for attend, plans in made.items():
            attend.use(append, plans)

    def _fill(self, held: Sequence[mx.array]) -> None:
        rest = iter(held)
        for store in self._cache.stores:
            store.sealed = [next(rest) for _ in store.sealed]
            store.first = [next(rest) for _ in store.first]
            store.kept = [next(rest) for _ in store.kept]
            store.recent = RecentRows(self._append.old, (next(rest), next(rest)))
        for recurrent in self._cache.recurrent:
            recurrent.advance(self._slots, [next(rest) for _ in recurrent.shapes])


@lru_cache(64)
def _blank(spec: AttentionSpec, dtype: mx.Dtype, entries: int, length: int) -> tuple[mx.array, mx.array]:
    """Return empty recent rows, evaluated because other threads will use them."""
    keys, values = (mx.zeros((entries, spec.kv_heads, length, dim), dtype) for dim in (spec.key_dim, spec.value_dim))
    mx.eval(keys, values)
    return keys, values


@lru_cache(1)
def _nothing() -> mx.array:
    made = mx.zeros(8, mx.int32)
    mx.eval(made)
    return made
