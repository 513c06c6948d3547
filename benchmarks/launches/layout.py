"""Strides of arrays, which decide where MLX needs copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """An array of a graph. `strides` are in numbers. `stage` is the length of the longest chain of launches before the array exists."""

    shape: Shape
    dtype: mx.Dtype
    strides: Shape
    stage: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of distinct numbers. A repeated axis counts once."""
        return math.prod(n for n, stride in zip(self.shape, self.strides, strict=True) if stride) * self.dtype.size

    @property
    def in_rows(self) -> bool:
        """MLX's `row_contiguous`: no gaps, and the last axis is the fastest. Axes of one element do not matter."""
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True

    @property
    def dense(self) -> bool:
        """MLX's `contiguous`: no gaps, in any order of axes."""
        expected = 1
        for stride, n in sorted((stride, n) for n, stride in zip(self.shape, self.strides, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= n
        return True


def rows(shape: Sequence[int]) -> Shape:
    """The strides of a new array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def reshaped(array: Laid, shape: Shape) -> Laid | None:
    """`prepare_reshape` in mlx/backend/common/common.cpp. Returns None if a copy is needed."""
    if array.in_rows or not array.size:
        return replace(array, shape=shape, strides=rows(shape))
    runs = _collapsed(array)
    strides: list[int] = []
    for n in shape:
        if runs and runs[0][0] % n == 0:
            left, step = runs[0][0] // n, runs[0][1]
            strides.append(left * step)
            runs = [(left, step), *runs[1:]] if left > 1 else runs[1:]
        elif n == 1:
            strides.append(strides[-1] if strides else 1)
        else:
            return None
    return replace(array, shape=shape, strides=tuple(strides))


def _collapsed(array: Laid) -> list[tuple[int, int]]:
    """Axes after merging neighbours without gaps, as (elements, stride)."""
    runs: list[tuple[int, int]] = []
    for n, stride in zip(array.shape, array.strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = (runs[-1][0] * n, stride)
        else:
            runs.append((n, stride))
    return runs


def realigned(array: Laid, shape: Shape) -> Laid:
    """Add or remove axes of one element."""
    left = iter([stride for n, stride in zip(array.shape, array.strides, strict=True) if n != 1])
    return replace(array, shape=shape, strides=tuple(1 if n == 1 else next(left) for n in shape))


def broadcast(array: Laid, shape: Shape) -> Laid:
    missing = len(shape) - len(array.shape)
    old = (*(1,) * missing, *array.shape)
    strides = (*(0,) * missing, *array.strides)
    kept = tuple(0 if was == 1 and n != 1 else stride for n, was, stride in zip(shape, old, strides, strict=True))
    return replace(array, shape=shape, strides=kept)


def transposed(array: Laid, axes: Sequence[int]) -> Laid:
    return replace(array, shape=tuple(array.shape[a] for a in axes), strides=tuple(array.strides[a] for a in axes))


def sliced(array: Laid, shape: Shape, steps: Sequence[int]) -> Laid:
    return replace(array, shape=shape, strides=tuple(stride * step for stride, step in zip(array.strides, steps, strict=True)))


def like(arrays: Sequence[Laid], shape: Shape, dtype: mx.Dtype) -> Laid:
    """The result of an elementwise operation, with the strides of its inputs if these have no gaps."""
    same = [a for a in arrays if a.shape == shape]
    whole = same and same[0].dense and all(a.strides == same[0].strides for a in same)
    return Laid(shape, dtype, same[0].strides if whole else rows(shape))
