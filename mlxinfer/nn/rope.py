"""Rotary position embeddings on a flat row of tokens, each with its own position.

The rotated pairs are `(i, i + dims / 2)` of the first `dims` channels of a head; channels beyond pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache.base import Rotation, Segment, Step

Frequencies = NDArray[np.float64]
"""Radians per position, `[dims / 2]`."""


@dataclass(slots=True)
class Rope:
    """How heads are rotated. `frequencies(length)` are those of a sequence of that length; `regime(length)` is equal for lengths
    that share them. `gain` multiplies the rotated channels of queries and keys alike (yarn, longrope). `context` is how many
    positions it is meant for. Crossing `boundary` changes the rotation of every token of a sequence, those in the cache as well."""

    dims: int
    context: int
    frequencies: Callable[[int], Frequencies]
    regime: Callable[[int], int]
    gain: float = 1.0
    boundary: int | None = None
    _last: tuple[int, _Regime] | None = None

    def at(self, step: Step) -> Rotation:
        """The rotation for the rows of a step."""
        return _Rotation(step, self.dims, [self._regime(_length(segment)) for segment in step.segments])

    def _regime(self, length: int) -> _Regime:
        """Nearly every step has the regime of the one before."""
        key = self.regime(length)
        if self._last is None or self._last[0] != key:
            self._last = key, _Regime(self.frequencies(length).tolist())
        return self._last[1]


def _length(segment: Segment) -> int:
    return max(segment.total, segment.past + segment.count)


class _Regime:
    """Radians per position, and the same as positions per radian on the device once that is asked for."""

    def __init__(self, frequencies: list[float]) -> None:
        self.frequencies = frequencies

    @cached_property
    def periods(self) -> mx.array:
        with np.errstate(divide="ignore"):
            return mx.array((1 / np.array(self.frequencies)).astype(np.float32))


class _Rotation:
    """Rotates all rows with one call if their segments have one regime, otherwise by cosines and sines `[T, 1, dims / 2]`."""

    def __init__(self, step: Step, dims: int, regimes: list[_Regime]) -> None:
        self._step = step
        self._dims = dims
        self._regimes = regimes

    @property
    def frequencies(self) -> list[list[float]]:
        return [regime.frequencies for regime in self._regimes]

    def __call__(self, x: mx.array) -> mx.array:
        first = self._regimes[0]
        if any(regime is not first for regime in self._regimes):
            return self._row_by_row(x)
        rows, positions = x[:, :, None], self._step.positions
        return mx.fast.rope(rows, self._dims, traditional=False, base=None, scale=1.0, offset=positions, freqs=first.periods).squeeze(2)

    def _row_by_row(self, x: mx.array) -> mx.array:
        cos, sin = self._waves
        half = cos.shape[-1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return mx.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1).astype(x.dtype)

    @cached_property
    def _waves(self) -> tuple[mx.array, mx.array]:
        counts = [segment.count for segment in self._step.segments]
        rows = np.repeat(np.array(self.frequencies), counts, axis=0)
        angles = self._step.positions[:, None] * mx.array(rows.astype(np.float32))
        return mx.cos(angles)[:, None], mx.sin(angles)[:, None]
