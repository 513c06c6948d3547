"""Rotary position embeddings on a flat row of tokens, each with its own position.

The rotated pairs are `(i, i + dims / 2)` of the first `dims` channels of a head; channels beyond pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache.base import Segment, Step

Frequencies = NDArray[np.float64]
"""Radians per position, `[dims / 2]`."""


class Rotation(Protocol):
    """The rotation of one step, made once and used by every layer: `[T, heads, head_dim]` to the same."""

    def __call__(self, x: mx.array) -> mx.array: ...


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
    _last: tuple[int, mx.array] | None = None

    def at(self, step: Step) -> Rotation:
        """The rotation for the rows of a step."""
        regimes = {self.regime(_length(segment)) for segment in step.segments}
        if len(regimes) <= 1:
            return _OneRegime(self.dims, step.positions, self._periods(regimes.pop() if regimes else 0))
        rows = [np.broadcast_to(self.frequencies(_length(s)), (s.count, self.dims // 2)) for s in step.segments]
        angles = step.positions[:, None] * mx.array(np.concatenate(rows).astype(np.float32))
        return _PerRow(mx.cos(angles)[:, None], mx.sin(angles)[:, None])

    def _periods(self, regime: int) -> mx.array:
        """Positions per radian. Nearly every step has the regime of the one before."""
        if self._last is None or self._last[0] != regime:
            with np.errstate(divide="ignore"):
                self._last = regime, mx.array((1 / self.frequencies(regime)).astype(np.float32))
        return self._last[1]


def _length(segment: Segment) -> int:
    return max(segment.total, segment.past + segment.count)


@dataclass(frozen=True, slots=True)
class _OneRegime:
    dims: int
    positions: mx.array
    periods: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        rows = x[:, :, None]
        return mx.fast.rope(rows, self.dims, traditional=False, base=None, scale=1.0, offset=self.positions, freqs=self.periods).squeeze(2)


@dataclass(frozen=True, slots=True)
class _PerRow:
    """Segments of one step that rotate differently: cosines and sines `[T, 1, dims / 2]`."""

    cos: mx.array
    sin: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        half = self.cos.shape[-1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = [low * self.cos - high * self.sin, high * self.cos + low * self.sin, rest]
        return mx.concatenate(rotated, axis=-1).astype(x.dtype)
