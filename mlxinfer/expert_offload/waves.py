"""Experts that are read into the slots of a pool when a router chooses them, some at a time if the pool is too small for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..errors import ExpertReadError, MLXInferError

if TYPE_CHECKING:
    from .pool import ExpertPool
    from .store import ExpertStore


EXPECTED_ROWS = 4
"""Maximum rows for which expected experts are read ahead. More rows need most experts of a layer anyway."""


def by_rank(expected: np.ndarray) -> np.ndarray:
    """Order predictions `[T, n]`, the most probable of each row first: `[n * T]`."""
    return np.ascontiguousarray(expected.T).reshape(-1)


def rows_in_waves(
    waves: Iterator[np.ndarray], first: np.ndarray, x: mx.array, compute: Callable[[mx.array, mx.array], mx.array], dtype: mx.Dtype
) -> mx.array:
    """Compute `compute(rows [n, hidden], slots [n, 1])` -> `[n, 1, hidden]` for the entries of each wave: `[T, k, hidden]` in all.

    `first` is the first of the waves, int32 `[T, k]`. The slots are given to `compute` as `dtype`.
    """
    count, shape = first.shape[-1], first.shape
    y: mx.array | None = None
    slots: np.ndarray | None = first
    while slots is not None:
        entries = np.flatnonzero(slots.reshape(-1) >= 0).astype(np.int32)
        if entries.size:
            rows, chosen = mx.array(entries // count), mx.array(slots.reshape(-1)[entries][:, None]).astype(dtype)
            part = compute(x[rows], chosen).squeeze(1)
            if y is None:
                y = mx.zeros((first.size, part.shape[-1]), part.dtype)
            y[mx.array(entries)] = part
            mx.eval(y)  # the next wave replaces the slots
        slots = next(waves, None)
    assert y is not None
    return y.reshape(*shape, -1)


def row_groups(chosen: np.ndarray, slots: int) -> Iterator[slice]:
    """Yield consecutive rows of `chosen` `[T, k]` with at most `slots` different experts together, k <= `slots`."""
    begin, seen = 0, set[int]()
    for row, experts in enumerate(chosen.tolist()):
        together = seen | set(experts)
        if len(together) > slots and row > begin:
            yield slice(begin, row)
            begin, together = row, set(experts)
        seen = together
    yield slice(begin, len(chosen))


class NextWave:
    """Brings experts into a pool for a program of the CPU kernels; see `kernels_cpu.NextWave`. A failed read ends the waves."""

    def __init__(self, store: ExpertStore, pool: ExpertPool, chosen: int) -> None:
        """`chosen` are the experts of a row. `store` records errors."""
        self._store, self._pool, self._count = store, pool, chosen
        self._waves: Iterator[np.ndarray] = iter(())
        self._left = 0

    def __call__(self, chosen: np.ndarray, expected: np.ndarray, wave: int, slots: np.ndarray) -> bool:
        slots.fill(-1)
        if self._store.fault is not None:  # an earlier layer of this step
            return False
        done = False
        try:
            more = self._next(chosen, wave, slots)
            done = True
            return more
        except MLXInferError as error:
            self._store.record_fault(error)
            return False
        finally:
            if not done:  # the kernels drop any other exception, as MLX's thread cannot raise it
                self._store.record_fault(ExpertReadError("the experts of a layer could not be read: load the model again"))

    def _next(self, chosen: np.ndarray, wave: int, slots: np.ndarray) -> bool:
        if wave == 0:
            self._left = chosen.size
            self._waves = iter(self._pool.waves(chosen.reshape(-1, self._count)))
        found = next(self._waves).reshape(-1)
        slots[:] = found
        self._left -= int(np.count_nonzero(found >= 0))
        return self._left > 0
