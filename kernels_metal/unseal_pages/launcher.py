"""Launches `unseal_pages`: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..executors import get_kernel
from ..formats import v_group
from ..paged_attention.arrays import expect, first_arrays, integers, nothing, sealed_arrays
from ..paged_attention.tiles import PAGE, Shape, check_shape
from ..paged_attention_prefill.launcher import pool_inputs
from ..paged_attention_prefill.tiles import prefill_tile

SEALED, FILLED, FIRST, RAW = range(4)
"""Kinds of pages: in the pool, sealed by this step, in the pool of first pages, or raw."""
_THREADS = 256


@dataclass(frozen=True, slots=True)
class UnsealPlan:
    """Order of pages to concatenate; created once per step for all layers with the same page ids."""

    pages: tuple[int, int, int, int]
    count: int
    """Pages of the result."""
    table: mx.array
    """int32 `[count, 2]`: kind and number of each page."""


def plan_unseal(places: Sequence[tuple[int, int]], pages: tuple[int, int, int, int]) -> UnsealPlan:
    """Plan pages in the order of `places`, (kind, number). `pages` has the number of pages of each kind. Raises ValueError for pages that
    do not exist."""
    for kind, number in places:
        if not SEALED <= kind <= RAW or not 0 <= number < pages[kind]:
            raise ValueError(f"page {number} of kind {kind}; there are {pages} of the kinds 0 to {RAW}")
    return UnsealPlan(pages, len(places), integers(places))


def unseal_pages(
    sealed: Sequence[mx.array],
    filled: Sequence[mx.array],
    first: Sequence[mx.array],
    raw: Sequence[mx.array],
    plan: UnsealPlan,
    shape: Shape,
    *,
    after: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return keys and values `[Hkv, count * 64, D]` in the compute dtype.

    `sealed` and `first` are the pools, `filled` pages in the form of `sealed`, `raw` pages `[Hkv, n, 64, D]`; all but `sealed` may be
    empty. With `after`, nothing is computed before that array is; otherwise the copies of many layers would be in memory together. Raises
    ValueError if arrays do not fit the plan, and `UnsupportedShapeError` for shapes without a kernel.
    """
    check_shape(shape)
    _check(sealed, filled, first, raw, plan, shape)
    table = plan.table if after is None else mx.depends([plan.table], [after])[0]
    keys, values = get_kernel("unseal_pages/unseal_pages.metal", "unseal_pages")(
        inputs=[
            *pool_inputs(sealed, shape),
            *pool_inputs(filled, shape),
            *(a if a.size else nothing(a.dtype) for a in first or [nothing(shape.dtype)] * 2),
            *(raw or [nothing(shape.dtype)] * 2),
            table,
        ],
        template=[
            ("T", shape.dtype),
            ("KEY_DIM", shape.key_dim),
            ("VALUE_DIM", shape.value_dim),
            ("K_BITS", shape.k_bits),
            ("V_BITS", shape.v_bits),
            ("GROUP", v_group(shape.value_dim)),
            ("KEYS", prefill_tile(shape).keys),
        ],
        output_shapes=[(shape.kv_heads, plan.count * PAGE, dim) for dim in (shape.key_dim, shape.value_dim)],
        output_dtypes=[shape.dtype] * 2,
        grid=(_THREADS * plan.count, shape.kv_heads, 2),
        threadgroup=(_THREADS, 1, 1),
    )
    return keys, values


def _check(
    sealed: Sequence[mx.array],
    filled: Sequence[mx.array],
    first: Sequence[mx.array],
    raw: Sequence[mx.array],
    plan: UnsealPlan,
    shape: Shape,
) -> None:
    counts = plan.pages
    expect("sealed pages", sealed, sealed_arrays(shape, counts[SEALED]))
    if filled or counts[FILLED]:
        expect("pages that became full", filled, sealed_arrays(shape, counts[FILLED]))
    if first or counts[FIRST]:
        expect("first pages", first, first_arrays(shape, counts[FIRST]))
    if raw or counts[RAW]:
        dims = (shape.key_dim, shape.value_dim)
        expect("raw pages", raw, [((shape.kv_heads, counts[RAW], PAGE, dim), shape.dtype) for dim in dims])
