"""How attention reads and fills the pages: the native CPU operation where it is there, otherwise plain MLX. Chosen once per cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from .. import kernels_cpu
from ..device import is_gpu
from ..kernels_metal.paged_attention.reference import attention
from .base import PAGE, Segment
from .pages import AttentionGroup, PageTable
from .store import LayerStore


@dataclass(frozen=True, slots=True)
class Options:
    """As in `base.Step.attend`."""

    scale: float
    softcap: float | None = None
    sinks: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Attended:
    """`rows` `[T, Hq, Dv]`, and by slot the keys and values `[Hkv, pages * PAGE, D]` of the pages that became full."""

    rows: mx.array
    full: dict[int, list[mx.array]]


class StepAttention(Protocol):
    """Attention in the layers of one window, in one step."""

    def __call__(self, store: LayerStore, q: mx.array, k: mx.array, v: mx.array, options: Options) -> Attended:
        """Append k and v to the open pages of `store`, and attend with q."""
        ...


class AttentionBackend(Protocol):
    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention: ...


def attention_backend() -> AttentionBackend:
    return NativeAttention() if kernels_cpu.available() and not is_gpu() else PlainAttention()


class PlainAttention:
    """Puts each sequence's keys and values together and attends with MLX's own operation."""

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> StepAttention:
        return _PlainStep(segments, group)


@dataclass(frozen=True, slots=True)
class _PlainStep:
    segments: tuple[Segment, ...]
    group: AttentionGroup

    def __call__(self, store: LayerStore, q: mx.array, k: mx.array, v: mx.array, options: Options) -> Attended:
        outputs, full = [], {}
        for s in self.segments:
            rows = slice(s.start, s.start + s.count)
            table = self.group.tables[s.slot]
            tails = store.append(s.slot, s.past - table.end, [k[rows].swapaxes(0, 1), v[rows].swapaxes(0, 1)])
            filled = (s.past + s.count) // PAGE - s.past // PAGE
            if filled:
                full[s.slot] = [t[:, : filled * PAGE] for t in tails]
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
        return Attended(outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), full)

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
        filled = [(s.slot, (s.past + s.count) // PAGE - s.past // PAGE) for s in segments]
        return _NativeStep(kernels_cpu.attention_plan(parts, group.window), [(slot, n) for slot, n in filled if n])


@dataclass(frozen=True, slots=True)
class _NativeStep:
    plan: Any
    filled: list[tuple[int, int]]

    def __call__(self, store: LayerStore, q: mx.array, k: mx.array, v: mx.array, options: Options) -> Attended:
        rows, store.open, pages = kernels_cpu.paged_attention(
            q, k, v, store.sealed, store.open, self.plan, scale=options.scale, softcap=options.softcap, sinks=options.sinks
        )
        full, start = {}, 0
        for slot, count in self.filled:
            full[slot] = [p[:, start : start + count] for p in pages]
            start += count
        return Attended(rows, full)
