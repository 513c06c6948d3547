"""Launches `add_norm`: adds the result of a part to the residual stream and norms the sum."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..executors import Launch, Template
from .reference import Norm

MOST_CHANNELS = 16384
"""Maximum that fits in the registers of a threadgroup."""
_SIMDGROUPS = 8
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def add_norm(result: mx.array, stream: mx.array, after: Norm | None, before: Norm, scale: float = 1.0) -> tuple[mx.array, mx.array]:
    """See `reference.add_norm`: `[T, n]` to sums and normed sums, all of one dtype, n at most 16384. Raises ValueError for different
    shapes, and `UnsupportedShapeError`."""
    sums, normed = launch_of(result, stream, after, before).run(inputs_of(result, stream, after, before, scale))
    return sums, normed


def launch_of(result: mx.array, stream: mx.array, after: Norm | None, before: Norm) -> Launch:
    """Return the launch of `add_norm` for arrays of these shapes, which callers may cache. Raises the errors of `add_norm`."""
    rows, dim = _check(result, stream, after, before)
    simdgroups, dtype = min(_SIMDGROUPS, -(-dim // 128)), stream.dtype
    template: Template = [("T", dtype), ("DIM", dim), ("SIMDGROUPS", simdgroups), ("AFTER", after is not None)]
    threads = 32 * simdgroups
    return Launch("add_norm/add_norm.metal", "add_norm", template, [(rows, dim)] * 2, [dtype] * 2, (threads, rows, 1), (threads, 1, 1))


def inputs_of(result: mx.array, stream: mx.array, after: Norm | None, before: Norm, scale: float) -> list[mx.array]:
    """Return the inputs of the kernel."""
    return [result, stream, (after or before)[0], before[0], _epsilons_and_scale(after[1] if after else 0.0, before[1], scale)]


@cache
def _epsilons_and_scale(after: float, before: float, scale: float) -> mx.array:
    made = mx.array([after, before, scale], mx.float32)
    mx.eval(made)  # it outlives the thread that made it
    return made


def _check(result: mx.array, stream: mx.array, after: Norm | None, before: Norm) -> tuple[int, int]:
    shape, dtype = stream.shape, stream.dtype
    weights = [before[0]] if after is None else [before[0], after[0]]
    if len(shape) != 2 or 0 in shape or result.shape != shape or [w.shape for w in weights] != [shape[1:]] * len(weights):
        found = [list(a.shape) for a in (result, stream, *weights)]
        raise ValueError(f"result, stream and weights are {found}; expected two of [rows, n], and [n]")
    if dtype not in _DTYPES or shape[1] > MOST_CHANNELS or [w.dtype for w in weights] != [dtype] * len(weights) or result.dtype != dtype:
        names = ", ".join(sorted({str(a.dtype).removeprefix("mlx.core.") for a in (result, stream, *weights)}))
        raise UnsupportedShapeError(f"no sum with norm of {names} and {shape[1]} channels; there are one float dtype, {MOST_CHANNELS}")
    return shape[0], shape[1]
