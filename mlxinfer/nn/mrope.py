"""Rotary embeddings with three positions (M-RoPE, arXiv:2409.12191): time, row and column of an image row; equal for text.

A pair of channels turns by one of the positions. Sequences without images have equal positions, and run as with any other rope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache.base import Rotation, Segment, Step
from ..util.dataclass import dataclass
from .rope import Regime, RegimeRotation, Rope, RopePart

Axes = NDArray[np.intp]
"""Position that turns each pair of channels: 0 time, 1 row, 2 column; `[dims / 2]`."""


def interleaved_axes(sections: Sequence[int], pairs: int) -> Axes:
    """Return time, row, column, time, … with as many rows and columns as `sections` says (Qwen3-VL, Qwen3.5)."""
    axes = np.zeros(pairs, np.intp)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def chunked_axes(sections: Sequence[int]) -> Axes:
    """Return `sections[0]` times time, then rows, then columns (Qwen2-VL, Qwen2.5-VL)."""
    return np.repeat(np.arange(3), sections)


@dataclass(slots=True)
class MRope(Rope):
    """Rope whose pairs turn by one of three positions; its frequencies do not depend on the length."""

    axes: Axes = field(default_factory=lambda: np.zeros(0, np.intp))

    @classmethod
    def of(cls, rope: Rope, axes: Axes) -> MRope:
        """Return `rope` with an axis for each of its pairs."""
        return cls(rope.dims, rope.context, rope.frequencies, rope.regime, rope.gain, rope.boundary, axes=axes)

    def at(self, step: Step) -> Rotation:
        """The rotation for the rows of a step."""
        if not [s for s in step.segments if s.shift or s.rope is not None]:
            return Rope.at(self, step)
        return ShiftedRotation(step, self.dims, [self._regime(0)] * len(step.segments), self.axes)


class ShiftedRotation(RegimeRotation):
    """Rotation of a step in which positions are not indices."""

    def __init__(self, step: Step, dims: int, regimes: list[Regime], axes: Axes) -> None:
        super().__init__(step, dims, regimes)
        self._axes = axes

    @property
    def parts(self) -> list[RopePart]:
        found: list[RopePart] = []
        for segment, regime in zip(self._step.segments, self._regimes, strict=True):
            if segment.rope is None:
                found.append((regime.frequencies, segment.past + segment.shift, segment.count))
            else:
                found += self._image_parts(segment.rope, regime)
        return found

    def _image_parts(self, positions: NDArray[np.int32], regime: Regime) -> list[RopePart]:
        """Return a part for each stretch of text, and one for each image row, whose frequencies are its angles."""
        angles, on_grid = self._angles(positions, regime), _on_grid(positions)
        # A stretch ends where a row is in an image, or where the position does not follow the one before.
        continues = (np.diff(positions[0], prepend=-2) == 1) & ~on_grid & ~np.concatenate([[True], on_grid[:-1]])
        starts = np.flatnonzero(~continues)
        ends = [*starts[1:].tolist(), positions.shape[1]]
        found: list[RopePart] = []
        for start, end in zip(starts.tolist(), ends, strict=True):
            text = (regime.frequencies, int(positions[0, start]), end - start)
            found.append((angles[start].tolist(), 1, 1) if on_grid[start] else text)
        return found

    def _angles(self, positions: NDArray[np.int32], regime: Regime) -> NDArray[np.float64]:
        """Return float64 `[count, dims / 2]` of positions `[3, count]`."""
        angles: NDArray[np.float64] = positions[self._axes].T * regime.radians
        return angles

    def _segment_angles(self, segment: Segment, regime: Regime) -> NDArray[np.float64]:
        if segment.rope is not None:
            return self._angles(segment.rope, regime)
        first = segment.past + segment.shift
        return np.outer(np.arange(first, first + segment.count), regime.radians)

    @cached_property
    def offsets(self) -> mx.array:
        """Position of each text row, int32 `[T]`; the time of an image row."""
        found = [
            np.arange(s.past + s.shift, s.past + s.shift + s.count, dtype=np.int32) if s.rope is None else s.rope[0]
            for s in self._step.segments
        ]
        return mx.array(np.concatenate(found))

    @cached_property
    def _in_images(self) -> mx.array | None:
        """True for rows with different positions, `[T, 1, 1]`; None without any."""
        found = [np.zeros(s.count, np.bool_) if s.rope is None else _on_grid(s.rope) for s in self._step.segments]
        rows = np.concatenate(found)
        return mx.array(rows)[:, None, None] if rows.any() else None

    def __call__(self, x: mx.array) -> mx.array:
        # The same operation as in steps without images: a row's digits do not depend on the other rows of its step.
        y = self._fast(x, self.offsets)
        return y if self._in_images is None else mx.where(self._in_images, self._row_by_row(x), y)


def _on_grid(positions: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return True for columns of `[3, count]` with different positions."""
    found: NDArray[Any] = (positions != positions[0]).any(axis=0)
    return found
