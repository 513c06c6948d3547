"""Segments that attend apart from the others of a step: those with images whose rows see one another, in plain MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx

from ...util.dataclass import dataclass
from ..base import AttentionParams, HeadSteps, Rotation, Segment
from ..pages import AttentionGroup
from ..store import LayerStore
from .head_steps import separate
from .native import AttentionBackend, Full, SharedAttention
from .reference import PlainStep


class ApartStep:
    """Implements `StepAttention` for a step with `Segment.spans`: their segments in plain MLX, the others with the layers' backend.

    On a CPU, a span that sees all of its past attends with the kernel of vision towers.

    The others get the same arguments as in a step of their own, so their numbers do not depend on images beside them.
    """

    def __init__(self, backend: AttentionBackend, segments: tuple[Segment, ...], group: AttentionGroup) -> None:
        apart, others = [s for s in segments if s.spans], [s for s in segments if not s.spans]
        self._plain = PlainStep(tuple(apart), group, kernels=True)
        self._others = backend.begin(tuple(renumbered_segments(others)), group) if others else None
        self._part = _Part(segments, others)
        self._rotation: tuple[Rotation | None, Rotation | None] = None, None
        self._order = row_order(segments, [*others, *apart])

    def rows(self, store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> tuple[mx.array, Full]:
        answers: list[mx.array] = []
        full: Full = {}
        if self._others is not None:
            own = replace(heads, rotation=self._part_of(heads.rotation))
            y, full = self._others.rows(store, [piece[self._part.rows] for piece in rows], own, params)
            answers.append(y)
        q, k, v = (x.astype(store.dtype) for x in separate(rows, store.spec, heads))
        y, more = self._plain.heads(store, (q, k, v), params)
        return self._in_order([*answers, y.reshape(y.shape[0], -1).astype(rows[0].dtype)]), {**full, **more}

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        answers: list[mx.array] = []
        full: Full = {}
        if self._others is not None:
            q, k, v = (x[self._part.rows] for x in qkv)
            y, full = self._others.heads(store, (q, k, v), params)
            answers.append(y)
        q, k, v = (x.astype(store.dtype) for x in qkv)
        y, more = self._plain.heads(store, (q, k, v), params)
        return self._in_order([*answers, y.astype(qkv[0].dtype)]), {**full, **more}

    def again(self, store: LayerStore, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """See `base.Step.attend_again`."""
        answers: list[mx.array] = []
        if self._others is not None:
            own, others = replace(heads, rotation=self._part_of(heads.rotation)), cast("SharedAttention", self._others)
            answers.append(others.again(store, rows[self._part.rows], own, params))
        y = self._plain.again(store, rows.astype(store.dtype), heads, params)
        return self._in_order([*answers, y.astype(rows.dtype)])

    def _part_of(self, rotation: Rotation | None) -> Rotation | None:
        """Return the rotation of the other segments' rows, which layers share if they share that of the step."""
        if rotation is not None and self._rotation[0] is not rotation:
            self._rotation = rotation, _PartOfRotation(rotation, self._part)
        return None if rotation is None else self._rotation[1]

    def _in_order(self, answers: Sequence[mx.array]) -> mx.array:
        """Join the answers in the step's order of rows."""
        y = answers[0] if len(answers) == 1 else mx.concatenate(list(answers))
        return y if self._order is None else y[self._order]


class _Part:
    """Some segments of a step, as a step of their own."""

    def __init__(self, segments: Sequence[Segment], chosen: Sequence[Segment]) -> None:
        rows = [s.start + i for s in chosen for i in range(s.count)]
        self.rows = mx.array(rows, mx.int32)
        """Their rows in the step."""
        self.numbers = dict(zip(rows, range(len(rows)), strict=True))
        """Their numbers by their row in the step."""
        self.places = mx.array([self.numbers.get(row, 0) for s in segments for row in range(s.start, s.start + s.count)], mx.int32)
        """For each row of the step, its number among `rows`; 0 for other rows."""


@dataclass(frozen=True, slots=True)
class _PartOfRotation:
    """`Rotation` of some segments."""

    whole: Rotation
    part: _Part

    @property
    def parts(self) -> list[tuple[Sequence[float], int, int]]:
        found, row = [], 0
        for part in self.whole.parts:
            if row in self.part.numbers:
                found.append(part)
            row += part[2]
        return found

    @property
    def waves(self) -> mx.array:
        return self.whole.waves[self.part.rows]

    def __call__(self, x: mx.array) -> mx.array:
        return self.whole(x[self.part.places])[self.part.rows]


def renumbered_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments renumbered as a complete step."""
    renumbered, done = [], 0
    for s in segments:
        renumbered.append(s if s.start == done else replace(s, start=done))
        done += s.count
    return renumbered


def row_order(segments: Sequence[Segment], computed: Sequence[Segment]) -> mx.array | None:
    """Return the index that restores the step's order of rows; None if they are in order."""
    if list(computed) == list(segments):
        return None
    starts, done = {}, 0
    for s in computed:
        starts[s.start], done = done, done + s.count
    return mx.array([starts[s.start] + i for s in segments for i in range(s.count)], mx.int32)
