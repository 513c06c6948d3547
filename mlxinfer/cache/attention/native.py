"""Attention backends: their interface, and the native CPU operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from ... import kernels_cpu
from ..base import PAGE, AttentionParams, HeadSteps, Rotation, Segment
from ..pages import AttentionGroup
from ..store import Filled, LayerStore
from .head_steps import separate

Full = dict[int, Filled]
"""Newly filled pages, by slot."""


class StepAttention(Protocol):
    """Attention in the layers of one window in a step. Both methods append to the open pages of `store`."""

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        """See `base.Step.attend`."""
        ...

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        """See `base.Step.attend_rows`."""
        ...


class SharedAttention(StepAttention, Protocol):
    """Attention in layers whose pages other layers also read."""

    def again(self, store: LayerStore, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """See `base.Step.attend_again`."""
        ...


class AttentionBackend(Protocol):
    """Implementation of paged attention. Equal backends share a step's preparation."""

    @property
    def name(self) -> str:
        """Name for the user."""
        ...

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        """Prepare a step for the layers with one window."""
        ...

    def joins_past(self, store: LayerStore) -> bool:
        """Return True if the past of such a layer is copied to one array (`reference.PlainStep`), which plans count."""
        ...

    def unsealed_bytes(self, store: LayerStore, rows: int) -> int:
        """Return the maximum bytes of a layer's dequantized past with the mask for a step of `rows` rows, which plans count."""
        ...


class NativeAttention:
    """One operation for all segments that reads sealed pages and writes open pages in place."""

    name = "the native operation for this CPU"

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> NativeStep:
        parts = []
        for s in segments:
            table = group.tables[s.slot]
            parts.append((s.slot, s.start, s.count, s.past, table.first, table.pages))
        return NativeStep(segments, kernels_cpu.attention_plan(parts, group.window))

    def joins_past(self, store: LayerStore) -> bool:
        return False

    def unsealed_bytes(self, store: LayerStore, rows: int) -> int:
        return 0


class NativeStep:
    """Implements `StepAttention` with the native CPU operation."""

    def __init__(self, segments: tuple[Segment, ...], plan: kernels_cpu.AttentionPlan) -> None:
        self.segments = segments
        self.plan = plan
        self._rotation: tuple[Rotation | None, kernels_cpu.Rotation | None] = None, None

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        y, full = self.rows(store, qkv, HeadSteps(), params)
        return y.reshape(y.shape[0], qkv[0].shape[1], -1), full

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        if heads.values is not None:  # the operation has no such step
            y, full = self.heads(store, separate(rows, store.spec, heads), params)
            return y.reshape(y.shape[0], -1), full
        assert heads.bias is None  # the products of these kernels add it
        q_norm, k_norm = heads.q_norm, heads.k_norm
        form = store.format
        answers, store.open, filled, first = kernels_cpu.paged_attention(
            rows,
            store.sealed,
            store.open,
            self.plan,
            scale=params.scale,
            softcap=params.softcap,
            sinks=params.sinks,
            query_norm=q_norm.weight if q_norm else None,
            key_norm=k_norm.weight if k_norm else None,
            eps=norm.eps if (norm := q_norm or k_norm) else 0.0,
            rotation=self.native_rotation(heads.rotation),
            k_bits=form.k_bits,
            v_bits=form.v_bits,
            first=store.first,
        )
        return answers, self.full(filled, first)

    def full(self, filled: list[mx.array], first: list[mx.array]) -> Full:
        """Return newly filled pages by slot, which the operation returns by segment."""
        full, start, first_start = {}, 0, 0
        for s in self.segments:
            if not s.filled:
                continue
            first_end = first_start + (1 if first and s.past < PAGE else 0)
            end = start + s.filled - (first_end - first_start)
            starts = [p[:, first_start:first_end] for p in first] if first_end > first_start else []
            full[s.slot] = Filled([p[:, start:end] for p in filled], starts)
            start, first_start = end, first_end
        return full

    def native_rotation(self, rotation: Rotation | None) -> kernels_cpu.Rotation | None:
        """Return cosines and sines, created once and shared by all layers."""
        if rotation is not None and self._rotation[0] is not rotation:
            self._rotation = rotation, kernels_cpu.rotation(rotation.parts)
        return None if rotation is None else self._rotation[1]


def _native_rotations(steps: Sequence[NativeStep], rotations: Sequence[Rotation | None]) -> list[kernels_cpu.Rotation | None]:
    """Return one plan per layer; most layers share the previous layer's step and rotation."""
    found: list[kernels_cpu.Rotation | None] = []
    last: tuple[NativeStep | None, Rotation | None, kernels_cpu.Rotation | None] = None, None, None
    for step, rotation in zip(steps, rotations, strict=True):
        if step is not last[0] or rotation is not last[1]:
            last = step, rotation, step.native_rotation(rotation)
        found.append(last[2])
    return found


def _again(stores: Sequence[LayerStore]) -> list[bool]:
    """Return True for each repeated layer, which is read only."""
    first = {store: place for place, store in reversed([*enumerate(stores)])}
    return [first[store] < place for place, store in enumerate(stores)]


def run_blocks(
    x: mx.array,
    blocks: kernels_cpu.Blocks,
    parts: Sequence[tuple[LayerStore, StepAttention]],
    rotations: Sequence[Rotation | None],
    states: Sequence[mx.array] = (),
    segments: Sequence[Segment] = (),
    given: mx.array | None = None,
) -> tuple[kernels_cpu.AfterBlocks, list[Full]]:
    """See `base.Step.run_blocks`. The attention of every part must be a `NativeStep`.

    `states` are those of all recurrent layers for the sequences of `segments`. Repeated layers are read only. Returns rows and states, and
    the filled pages of each part.
    """
    steps = [step for _, step in parts if isinstance(step, NativeStep)]
    stores = [store for store, _ in parts]
    again = _again(stores) if len(set(stores)) < len(stores) else [False] * len(stores)
    after = kernels_cpu.run_blocks(
        x,
        blocks,
        [store.sealed for store in stores],
        [store.kept for store in stores],  # the native operation has no separate recent rows
        [step.plan for step in steps],
        _native_rotations(steps, rotations),
        [(store.format.k_bits, store.format.v_bits) for store in stores],
        [store.first for store in stores],
        states,
        [(s.start, s.count) for s in segments],
        given,
        again,
    )
    if not any(after.filled):
        return after, [{}] * len(parts)
    filled = zip(steps, after.filled, after.first, strict=True)
    return after, [step.full(pages, first) if pages else {} for step, pages, first in filled]
