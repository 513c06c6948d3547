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


def add_norm(
    result: mx.array,
    stream: mx.array,
    after: Norm | None,
    before: Norm | None,
    scale: float = 1.0,
    gain: float = 1.0,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """See `reference.add_norm`: `[T, n]` to sums and normed sums, all of one dtype, n at most 16384. Raises ValueError for different
    shapes, and `UnsupportedShapeError`."""
    sums, normed = launch_of(result, stream, after, before, bias).run(inputs_of(result, stream, after, before, scale, gain, bias))
    return sums, sums if before is None else normed


def launch_of(result: mx.array, stream: mx.array, after: Norm | None, before: Norm | None, bias: mx.array | None = None) -> Launch:
    """Return the launch of `add_norm` for these shapes, which callers may cache. Without `before`, its second output is one number.
    Raises the errors of `add_norm`."""
    rows, dim = _check(result, stream, after, before, bias)
    simdgroups, dtype = min(_SIMDGROUPS, -(-dim // 128)), stream.dtype
    template: Template = [
        ("T", dtype),
        ("DIM", dim),
        ("SIMDGROUPS", simdgroups),
        ("AFTER", after is not None),
        ("BEFORE", before is not None),
        ("BIASED", bias is not None),
    ]
    threads, shapes = 32 * simdgroups, [(rows, dim), (rows, dim) if before else (1, 1)]
    return Launch("add_norm/add_norm.metal", "add_norm", template, shapes, [dtype] * 2, (threads, rows, 1), (threads, 1, 1))


def inputs_of(
    result: mx.array,
    stream: mx.array,
    after: Norm | None,
    before: Norm | None,
    scale: float,
    gain: float = 1.0,
    bias: mx.array | None = None,
) -> list[mx.array]:
    """Return the inputs of the kernel. Other inputs take the place of missing ones. Callers keep all but the first two, so these are not
    arrays of the step."""
    settings = _epsilons_and_factors(after[1] if after else 0.0, before[1] if before else 0.0, scale, gain)
    weights = [norm[0] if norm else other[0] if other else settings for norm, other in ((after, before), (before, after))]
    return [result, stream, *weights, settings if bias is None else bias, settings]


@cache
def _epsilons_and_factors(after: float, before: float, scale: float, gain: float) -> mx.array:
    made = mx.array([after, before, scale, gain], mx.float32)
    mx.eval(made)  # it outlives the thread that made it
    return made


def _check(result: mx.array, stream: mx.array, after: Norm | None, before: Norm | None, bias: mx.array | None) -> tuple[int, int]:
    shape, dtype = stream.shape, stream.dtype
    weights = [norm[0] for norm in (before, after) if norm] + ([] if bias is None else [bias])
    if len(shape) != 2 or 0 in shape or result.shape != shape or [w.shape for w in weights] != [shape[1:]] * len(weights):
        found = [list(a.shape) for a in (result, stream, *weights)]
        raise ValueError(f"result, stream and weights are {found}; expected two of [rows, n], and [n]")
    if dtype not in _DTYPES or shape[1] > MOST_CHANNELS or [w.dtype for w in weights] != [dtype] * len(weights) or result.dtype != dtype:
        names = ", ".join(sorted({str(a.dtype).removeprefix("mlx.core.") for a in (result, stream, *weights)}))
        raise UnsupportedShapeError(f"no sum with norm of {names} and {shape[1]} channels; there are one float dtype, {MOST_CHANNELS}")
    return shape[0], shape[1]
