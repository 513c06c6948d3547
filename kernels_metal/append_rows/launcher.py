"""Launches `append_rows`: checks arrays and locates queries, keys and values in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from ..executors import get_kernel
from ..paged_attention.arrays import cached_integers, expect, expect_floats, nothing
from ..paged_attention.tiles import Shape
from .plan import AppendPlan

_APPEND = ("append_rows/append_rows.metal", "append_rows")
_THREADS = 128


@dataclass(frozen=True, slots=True)
class RowPart:
    """Neighbouring heads in the rows of an array, each with all its channels."""

    rows: mx.array
    """`[T, n]`."""
    at: int
    """First column."""


@dataclass(frozen=True, slots=True)
class Norm:
    """`x / rms(x) * weight` per head."""

    weight: mx.array
    """`[Dk]`, floats."""
    eps: float
    """Added to the mean of squares."""


def append_rows(
    parts: tuple[RowPart, RowPart, RowPart],
    old: Sequence[mx.array],
    plan: AppendPlan,
    shape: Shape,
    *,
    bias: mx.array | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    waves: mx.array | None = None,
    value_eps: float | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Return queries `[T, Hq, Dk]`, and the recent keys and values `[entries, Hkv, plan.length, D]` after a step.

    `bias` `[n]`, of all queries, keys and values, is added first. Heads of queries and keys are normed, then rotated by `waves`, float32
    `[T, 2, dims / 2]`: cosines and sines of each row's angles. Heads of values are normed without a weight, if `value_eps` is given.
    `old` are the recent keys and values before the step (empty without any). Raises ValueError if arrays do not fit the plan.
    """
    check_rows(parts, old, plan, shape, bias, (q_norm, k_norm), waves)
    (queries, q_at), (keys, k_at), (values, v_at) = ((part.rows, part.at) for part in parts)
    half = 0 if waves is None else waves.shape[2]
    entries, length = len(plan.new), plan.length
    eps = epsilons(q_norm, k_norm, value_eps)
    made = plan.rows * shape.heads + 2 * entries * shape.kv_heads * length
    out, new_keys, new_values = get_kernel(*_APPEND)(
        inputs=[
            *(queries, keys, values),
            nothing(shape.dtype) if bias is None else bias,
            *(nothing(shape.dtype) if norm is None else norm.weight for norm in (q_norm, k_norm)),
            nothing(mx.float32) if waves is None else waves,
            *(old or [nothing(shape.dtype)] * 2),
            plan.entries,
            cached_integers(shape.heads, shape.kv_heads, q_at, k_at, v_at, half, plan.rows, length, entries),
            _settings(*eps[:2], float(bias is not None), eps[2]),
        ],
        template=[("T", shape.dtype), ("KEY_DIM", shape.key_dim), ("VALUE_DIM", shape.value_dim)],
        output_shapes=[
            (plan.rows, shape.heads, shape.key_dim),
            *((entries, shape.kv_heads, length, dim) for dim in (shape.key_dim, shape.value_dim)),
        ],
        output_dtypes=[shape.dtype] * 3,
        grid=(-(-32 * made // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )
    return out, [new_keys, new_values]


def epsilons(q_norm: Norm | None, k_norm: Norm | None, value_eps: float | None) -> tuple[float, float, float]:
    """Return the epsilons of the norms of queries, keys and values as the kernels take them: -1 without a norm."""
    q_eps, k_eps = (-1.0 if norm is None else norm.eps for norm in (q_norm, k_norm))
    return q_eps, k_eps, -1.0 if value_eps is None else value_eps


@lru_cache(64)
def _settings(*numbers: float) -> mx.array:
    return mx.array(numbers, mx.float32)


def check_rows(
    parts: tuple[RowPart, RowPart, RowPart],
    old: Sequence[mx.array],
    plan: AppendPlan,
    shape: Shape,
    bias: mx.array | None,
    norms: tuple[Norm | None, Norm | None],
    waves: mx.array | None,
) -> None:
    """Raise ValueError unless the plan can append these arrays."""
    sizes = (shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim)
    for part, size in zip(parts, sizes, strict=True):
        rows, width = part.rows.shape
        if rows != plan.rows or part.rows.dtype != shape.dtype or part.at < 0 or part.at + size > width:
            raise ValueError(f"{part.rows.dtype}{[rows, width]} does not hold {size} channels of {plan.rows} rows from {part.at} on")
    if old or plan.old:
        dims = (shape.key_dim, shape.value_dim)
        expect("recent rows", old, [((len(plan.old), shape.kv_heads, plan.old_length, dim), shape.dtype) for dim in dims])
    if bias is not None:
        expect("a bias", [bias], [((sum(sizes),), shape.dtype)])
    check_head_steps(shape, plan.rows, norms, waves)


def check_head_steps(shape: Shape, rows: int, norms: Sequence[Norm | None], waves: mx.array | None) -> None:
    """Raise ValueError unless heads of query or key size can be normed and rotated by these arrays."""
    for norm in norms:
        if norm is not None:
            expect_floats("weights of a norm", norm.weight, shape.key_dim)
    if waves is not None and 2 * waves.shape[-1] <= shape.key_dim:
        expect("cosines and sines", [waves], [((rows, 2, waves.shape[-1]), mx.float32)])
    elif waves is not None:
        raise ValueError(f"{2 * waves.shape[-1]} channels of {shape.key_dim} cannot be rotated")
