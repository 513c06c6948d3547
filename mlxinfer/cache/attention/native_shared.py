"""The native CPU operation for layers whose pages other layers also read. Whole blocks read them in one operation. If blocks run operation
by operation, the other layers attend in plain MLX."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...kernels_cpu import AttentionPlan
from ..base import PAGE, AttentionParams, Segment
from ..kv_format import KVFormat
from ..pages import AttentionGroup
from ..store import LayerStore
from .native import Full, NativeAttention, NativeStep
from .reference import Attended, PlainStep


class SharedNative(NativeAttention):
    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> SharedStep:
        return SharedStep(segments, super().begin(segments, group).plan, group)

    def joins_past(self, form: KVFormat) -> bool:
        return True


class SharedStep(NativeStep):
    """A step of `SharedNative`."""

    def __init__(self, segments: tuple[Segment, ...], plan: AttentionPlan, group: AttentionGroup) -> None:
        super().__init__(segments, plan)
        self._plain = PlainStep(segments, group)
        self._seen: dict[LayerStore, list[Attended]] = {}

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        """Open pages are written in place, so rows that other layers need from pages that become full are copied first."""
        before = [store.open_rows(s.slot, s.past % PAGE) if s.filled and s.past % PAGE else [] for s in self.segments]
        copies = [a for rows in before for a in rows]
        if copies:
            q, k, v = mx.depends(list(qkv), copies)
            qkv = q, k, v
        answers, full = super().heads(store, qkv, params)
        self._seen[store] = [self._attended(store, s, rows, qkv[1:], full) for s, rows in zip(self.segments, before, strict=True)]
        return answers, full

    def again(self, store: LayerStore, q: mx.array, params: AttentionParams) -> mx.array:
        """See `base.Step.attend_again`."""
        outputs = [
            attended.answers(q[s.start : s.start + s.count].swapaxes(0, 1), params, None).swapaxes(0, 1)
            for s, attended in zip(self.segments, self._seen[store], strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attended(self, store: LayerStore, segment: Segment, before: Sequence[mx.array], kv: Sequence[mx.array], full: Full) -> Attended:
        tails = [a[segment.slot][:, None] for a in store.open]
        if segment.filled:
            rows = [a[segment.start : segment.start + segment.count].swapaxes(0, 1) for a in kv]
            tails = [
                _pages(mx.concatenate([*first, new], axis=1)) for first, new in zip([[a] for a in before] or [[], []], rows, strict=True)
            ]
        return self._plain.attended(store, segment, (tails[0], tails[1]), full)


def _pages(rows: mx.array) -> mx.array:
    """`[Hkv, n, D]` to pages `[Hkv, n / 64, 64, D]`, the last one filled up."""
    missing = -rows.shape[1] % PAGE
    return mx.pad(rows, [(0, 0), (0, missing), (0, 0)]).reshape(rows.shape[0], -1, PAGE, rows.shape[-1])
