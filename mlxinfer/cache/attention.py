"""How attention reads and fills the pages: the native CPU operation where it is there, otherwise plain MLX. Chosen once per cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .. import kernels_cpu
from ..kernels_metal.paged_attention.reference import attention
from .base import PAGE, HeadSteps, Rotation, Segment
from .heads import separate
from .pages import AttentionGroup, PageTable
from .store import LayerStore


@dataclass(frozen=True, slots=True)
class Options:
    """As in `base.Step.attend`."""

    scale: float
    softcap: float | None = None
    sinks: mx.array | None = None


Full = dict[int, list[mx.array]]
"""By slot, the keys and values `[Hkv, pages * PAGE, D]` of the pages that became full."""


class StepAttention(Protocol):
    """Attention in the layers of one window, in one step. Both calls append to the open pages of `store`."""

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], options: Options) -> tuple[mx.array, Full]:
        """See `base.Step.attend`."""
        ...

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, options: Options) -> tuple[mx.array, Full]:
        """See `base.Step.attend_rows`."""
        ...


class AttentionBackend(Protocol):
    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention: ...


def attention_backend() -> AttentionBackend:
    return NativeAttention() if kernels_cpu.in_use() else PlainAttention()


class PlainAttention:
    """Puts each sequence's keys and values together and attends with MLX's own operation."""

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        return _PlainStep(segments, group)


@dataclass(frozen=True, slots=True)
class _PlainStep:
    segments: tuple[Segment, ...]
    group: AttentionGroup

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, options: Options) -> tuple[mx.array, Full]:
        y, full = self.heads(store, separate(rows, store.spec, heads), options)
        return y.reshape(y.shape[0], -1), full

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], options: Options) -> tuple[mx.array, Full]:
        q, k, v = qkv
        outputs, full = [], {}
        for s in self.segments:
            rows = slice(s.start, s.start + s.count)
            table = self.group.tables[s.slot]
            tails = store.append(s.slot, s.past - table.end, [k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)])
            if s.filled:
                full[s.slot] = [t[:, : s.filled * PAGE] for t in tails]
            keys, values = self._with_past(store, s, table, tails)
            out = attention(
                q[rows].swapaxes(0, 1),
                keys,
                values,
                scale=options.scale,
                window=self.group.window,
                softcap=options.softcap,
                sinks=options.sinks,
            )
            outputs.append(out.swapaxes(0, 1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), full

    def _with_past(self, store: LayerStore, segment: Segment, table: PageTable, tails: list[mx.array]) -> list[mx.array]:
        """Keys and values that the segment can see, `[Hkv, S, D]`: those behind the last sealed page are `tails`."""
        window = self.group.window
        oldest = 0 if window is None else max(segment.past - window + 1, 0)
        start, pages = table.from_position(oldest)
        if pages:
            past = store.past(pages)
            tails = [mx.concatenate([p, t], axis=1) for p, t in zip(past, tails, strict=True)]
        return [t[:, oldest - start :] for t in tails] if oldest > start else tails


class NativeAttention:
    """One operation for all segments, which reads the pages where they lie and writes the open ones in place."""

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        parts = []
        for s in segments:
            table = group.tables[s.slot]
            parts.append((s.slot, s.start, s.count, s.past, table.first, table.pages))
        return NativeStep(segments, kernels_cpu.attention_plan(parts, group.window))


class NativeStep:
    def __init__(self, segments: tuple[Segment, ...], plan: kernels_cpu.AttentionPlan) -> None:
        self.segments = segments
        self.plan = plan
        self.filled = [(s.slot, s.filled) for s in segments if s.filled]
        self._rotation: tuple[Rotation | None, kernels_cpu.Rotation | None] = None, None

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], options: Options) -> tuple[mx.array, Full]:
        y, full = self.rows(store, qkv, HeadSteps(), options)
        return y.reshape(y.shape[0], qkv[0].shape[1], -1), full

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, options: Options) -> tuple[mx.array, Full]:
        q_norm, k_norm = heads.q_norm, heads.k_norm
        answers, store.open, pages = kernels_cpu.paged_attention(
            rows,
            store.sealed,
            store.open,
            self.plan,
            scale=options.scale,
            softcap=options.softcap,
            sinks=options.sinks,
            query_norm=q_norm.weight if q_norm else None,
            key_norm=k_norm.weight if k_norm else None,
            eps=norm.eps if (norm := q_norm or k_norm) else 0.0,
            rotation=self.native_rotation(heads.rotation),
        )
        return answers, self.full(pages)

    def full(self, pages: list[mx.array]) -> Full:
        full, start = {}, 0
        for slot, count in self.filled:
            full[slot] = [p[:, start : start + count] for p in pages]
            start += count
        return full

    def native_rotation(self, rotation: Rotation | None) -> kernels_cpu.Rotation | None:
        """The cosines and sines, made for the first layer that asks and kept for the others."""
        if rotation is not None and self._rotation[0] is not rotation:
            parts = [(f, s.past, s.count) for f, s in zip(rotation.frequencies, self.segments, strict=True)]
            self._rotation = rotation, kernels_cpu.rotation(parts)
        return None if rotation is None else self._rotation[1]


def run_blocks(
    x: mx.array,
    blocks: kernels_cpu.Blocks,
    parts: Sequence[tuple[LayerStore, StepAttention]],
    rotations: Sequence[Rotation | None],
) -> tuple[mx.array, list[Full]]:
    """See `base.Step.run_blocks`; every part's attention is a `NativeStep`."""
    steps = [step for _, step in parts if isinstance(step, NativeStep)]
    stores = [store for store, _ in parts]
    x, filled = kernels_cpu.run_blocks(
        x,
        blocks,
        [store.sealed for store in stores],
        [store.open for store in stores],
        [step.plan for step in steps],
        [step.native_rotation(rotation) for step, rotation in zip(steps, rotations, strict=True)],
    )
    return x, [step.full(pages) for step, pages in zip(steps, filled, strict=True)]
