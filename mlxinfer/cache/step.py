"""Steps over pages: implementation of `base.Step`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import cast

import mlx.core as mx

from ..kernels_cpu import Blocks
from .attention.native import Full, SharedAttention, StepAttention, run_blocks
from .base import PAGE, AttentionParams, GivenRows, HeadSteps, OpaqueState, RecurrentUpdate, Rotation, Segment
from .state import RecurrentStore
from .store import Filled, LayerStore


class CacheStep:
    """Implements `base.Step`. `full` are the pages that the step fills, until the cache commits them."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        attention: Mapping[int, tuple[LayerStore, StepAttention]],
        recurrent: Mapping[int, RecurrentStore],
        opaque: Mapping[int, OpaqueState],
        *,
        runs_blocks: bool,
        has_pages: bool = False,
    ) -> None:
        """Create a step; `attention` and `recurrent` are by layer, `opaque` by slot.

        `runs_blocks` is True if all blocks use the native CPU operation, `has_pages` if an attention layer exists here or elsewhere.
        """
        self.segments = segments
        self.given: GivenRows | None = None
        self._runs_blocks = runs_blocks
        filled = [s for s in segments if (s.past + s.count) // PAGE > s.past // PAGE]
        self.needs_commit = has_pages and bool(filled)
        """True if a page becomes full in this step and must be sealed before the next step."""
        self.full: dict[tuple[int, int], Filled] = {}
        self.sent: list[mx.array] = []
        """Arrays sent to another machine, submitted before the rest of the step, which may wait for the reply."""
        self._attention = attention
        self._replaced: set[int] = set()
        self._written: list[mx.array] = []
        self._recurrent = recurrent
        self._opaque = opaque

    @cached_property
    def positions(self) -> mx.array:
        return mx.array([p for s in self.segments for p in range(s.past, s.past + s.count)], dtype=mx.int32)

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        store, attention = self._attention[layer]
        self._replaced.add(layer)
        return self._keep(layer, *attention.heads(store, (q, k, v), params))

    def attend_again(self, layer: int, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        store, attention = self._attention[layer]
        return cast("SharedAttention", attention).again(store, rows, heads, params)

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        store, attention = self._attention[layer]
        self._replaced.add(layer)
        y, full = attention.rows(store, rows, heads, params)
        return self._keep(layer, y, full) if full else y

    @property
    def runs_blocks(self) -> bool:
        return self._runs_blocks

    def run_blocks(
        self,
        x: mx.array,
        blocks: Blocks,
        layers: Sequence[int],
        rotations: Sequence[Rotation | None],
        recurrent: Sequence[int] = (),
        given: mx.array | None = None,
    ) -> mx.array:
        parts = [self._attention[layer] for layer in layers]
        if recurrent:
            slots, stores = [s.slot for s in self.segments], [self._recurrent[layer] for layer in recurrent]
            states = [store.join(slots) for store in stores]
            flat = [a for arrays in states for a in arrays]
            after, filled = run_blocks(x, blocks, parts, rotations, flat, self.segments, given)
            left = iter(after.states)
            for store, arrays in zip(stores, states, strict=True):
                store.advance(slots, [next(left) for _ in arrays])
        else:
            after, filled = run_blocks(x, blocks, parts, rotations, (), self.segments, given)
        y = after.rows
        self._written.append(y)
        for layer, full in zip(layers, filled, strict=True):
            if full:
                self._keep(layer, y, full)
        return y

    def _keep(self, layer: int, answers: mx.array, full: Full) -> mx.array:
        for slot, pages in full.items():
            self.full[layer, slot] = pages
        return answers

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        return self._recurrent[layer].run(self.segments, inputs, update)

    def opaque(self, segment: Segment) -> OpaqueState:
        return self._opaque[segment.slot]

    @property
    def attention(self) -> Collection[tuple[LayerStore, StepAttention]]:
        """Yield each attention layer with its backend step."""
        return self._attention.values()

    def replayed(self, arrays: Sequence[mx.array]) -> None:
        """Record arrays that the step left in the cache without calling its layers."""
        self._written += arrays

    def close(self) -> None:
        """Drop references to the cache, which cyclic references would keep alive until the next garbage collection."""
        self._attention = {}

    @property
    def state(self) -> list[mx.array]:
        """Arrays left in the cache, evaluated with the result so that graphs do not grow over steps."""
        arrays = [a for layer in self._replaced for a in self._attention[layer][0].arrays]
        arrays += self._written  # their evaluation writes pages
        arrays += [a for store in self._recurrent.values() for a in store.arrays]
        arrays += [a for full in self.full.values() for a in full.arrays]
        for segment in self.segments:
            if segment.slot in self._opaque:
                arrays += self._opaque[segment.slot].arrays()
        return arrays
