"""Steps of bidirectional models: each text is whole in a step, nothing is stored, and texts do not attend to one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx

from ..kernels_metal.paged_attention.reference import attention
from .attention.head_steps import separate
from .attention.reference_chunks import rows_at_once
from .base import AttentionParams, AttentionSpec, BidirectionalSpec, HeadSteps, Segment
from .step import CacheStep

_TOGETHER = 256
"""Maximum rows of short texts that attend in one operation under a mask, instead of one launch per text."""


class BidirectionalStep(CacheStep):
    """A `base.Step` over whole texts."""

    def __init__(self, segments: tuple[Segment, ...], specs: Mapping[int, BidirectionalSpec]) -> None:
        """Create a step; `specs` are by layer. Every segment is a whole text."""
        super().__init__(segments, {}, {}, {}, runs_blocks=False)
        assert not any(segment.past for segment in segments)
        self.needs_commit = False
        self._specs = specs
        self._groups = list(_groups(segments))
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        window = self._specs[layer].window
        answers = []
        for number, group in enumerate(self._groups):
            rows = slice(group[0].start, group[-1].start + group[-1].count)
            own = [x[rows].swapaxes(0, 1) for x in (q, k, v)]
            answers.append(_attend(own[0], own[1], own[2], params, self._mask(number, window)).swapaxes(0, 1))
        return answers[0] if len(answers) == 1 else mx.concatenate(answers)

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        spec = self._specs[layer]
        q, k, v = separate(rows, AttentionSpec(spec.kv_heads, spec.key_dim, spec.value_dim), heads)
        y = self.attend(layer, q, k, v, params)
        return y.reshape(y.shape[0], -1)

    def attend_again(self, layer: int, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        raise NotImplementedError("no layer reads what another one keeps where nothing is kept")

    def _mask(self, number: int, window: int | None) -> mx.array:
        """Return the mask of a group, bool `[L, L]`: keys of the query's text within the window."""
        group = self._groups[number]
        longest = max(segment.count for segment in group)
        key = number, None if window is None or longest <= window else window
        if key not in self._masks:
            self._masks[key] = _mask(group, key[1])
        return self._masks[key]


def _groups(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Return groups of consecutive texts of at most `_TOGETHER` rows; a longer text is a group alone."""
    group: list[Segment] = []
    for segment in segments:
        if group and segment.start + segment.count - group[0].start > _TOGETHER:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _mask(group: Sequence[Segment], window: int | None) -> mx.array:
    texts = mx.array([number for number, segment in enumerate(group) for _ in range(segment.count)], dtype=mx.int32)
    seen = texts[:, None] == texts[None]
    if window is not None:
        places = mx.arange(texts.size, dtype=mx.int32)
        seen &= mx.abs(places[:, None] - places[None]) < window
    return seen


def _attend(q: mx.array, k: mx.array, v: mx.array, params: AttentionParams, mask: mx.array) -> mx.array:
    """Attend with queries `[Hq, L, Dk]` in pieces whose scores fit in memory. Returns `[Hq, L, Dv]`."""
    rows = q.shape[1]
    count = rows_at_once(q.shape[0], rows, rows, fused=False)
    answers: list[mx.array] = []
    for start in range(0, rows, count):
        part, seen = (q, mask) if count == rows else (q[:, start : start + count], mask[start : start + count])
        if answers:
            (part,) = mx.depends([part], [answers[-1]])
        answers.append(attention(part, k, v, scale=params.scale, softcap=params.softcap, sinks=params.sinks, mask=seen))
    return answers[0] if len(answers) == 1 else mx.concatenate(answers, axis=1)
