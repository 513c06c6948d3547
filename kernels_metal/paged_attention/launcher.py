"""Calls the kernels of this folder: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..executors import get_kernel
from ..formats import v_group
from .arrays import expect, expect_floats, first_arrays, nothing, sealed_arrays, settings
from .plan import DecodePlan
from .tiles import PAGE

_DECODE = ("paged_attention/paged_attention_decode.metal", "paged_attention_decode")
_COMBINE = ("paged_attention/paged_attention_combine.metal", "paged_attention_combine")


def paged_attention_decode(
    q: mx.array,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend with q `[T, Hq, Dk]`; returns `[plan.rows, Hq, Dv]`, in the order of the plan's sequences.

    `sealed` and `first` are the pools (`first` may be empty), `open_pages` the open ones with the new rows already in them. Raises
    ValueError if arrays do not fit the plan.
    """
    shape = plan.shape
    _check(q, sealed, first, open_pages, sinks, plan)
    logits = nothing(shape.dtype) if sinks is None else sinks
    pools = _inputs(sealed, first, open_pages, plan)
    if plan.parts is None:
        numbers = settings(scale, softcap or 0.0, sinks is not None)
        return _decode([q, *pools, plan.table, plan.work, numbers, logits], plan, plan.rows, shape.dtype)[0]
    numbers = settings(scale, softcap or 0.0, False)
    answers, logs = _decode([q, *pools, plan.table, plan.work, numbers, logits], plan, plan.part_rows, mx.float32)
    return get_kernel(*_COMBINE)(
        inputs=[answers, logs, plan.parts, settings(scale, 0.0, sinks is not None), logits],
        template=[("T", shape.dtype), ("VALUE_DIM", shape.value_dim)],
        output_shapes=[(plan.rows, shape.heads, shape.value_dim)],
        output_dtypes=[shape.dtype],
        grid=(32, shape.heads, plan.rows),
        threadgroup=(32, 1, 1),
    )[0]


def _decode(inputs: list[mx.array], plan: DecodePlan, rows: int, dtype: mx.Dtype) -> list[mx.array]:
    shape, tile = plan.shape, plan.tile
    threads = 32 * tile.simdgroups
    return get_kernel(*_DECODE)(
        inputs=inputs,
        template=[
            ("T", shape.dtype),
            ("O", dtype),
            ("K_BITS", shape.k_bits),
            ("V_BITS", shape.v_bits),
            ("KEY_DIM", shape.key_dim),
            ("VALUE_DIM", shape.value_dim),
            ("GROUP", v_group(shape.value_dim)),
            ("HEADS", shape.group),
            ("QUERIES", tile.queries),
            ("KEY_RUN", tile.key_run),
            ("VALUE_RUN", tile.value_run),
            ("SIMDGROUPS", tile.simdgroups),
            ("SHARED", tile.shared),
            ("STAGE", tile.stage),
            ("STAGED_QUERIES", tile.staged_queries),
        ],
        output_shapes=[(rows, shape.heads, shape.value_dim), (rows, shape.heads)],
        output_dtypes=[dtype, mx.float32],
        grid=(threads, shape.kv_heads, plan.items),
        threadgroup=(threads, 1, 1),
    )


def _inputs(sealed: Sequence[mx.array], first: Sequence[mx.array], open_pages: Sequence[mx.array], plan: DecodePlan) -> list[mx.array]:
    """Arrays in the order of the kernel, with a stand-in for each that is missing or empty."""
    shape = plan.shape
    keys = 1 if shape.k_bits == 16 else 2
    scales = mx.float16
    pools = [
        sealed[0],
        sealed[1] if keys == 2 else nothing(scales),
        sealed[keys],
        sealed[keys + 1] if shape.v_bits != 16 else nothing(scales),
        *(first or [nothing(shape.dtype)] * 2),
    ]
    return [a if a.size else nothing(a.dtype) for a in pools] + list(open_pages)


def _check(
    q: mx.array,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    sinks: mx.array | None,
    plan: DecodePlan,
) -> None:
    s, pools = plan.shape, plan.pools
    expect("queries", [q], [((plan.query_rows, s.heads, s.key_dim), s.dtype)])
    expect("sealed pages", sealed, sealed_arrays(s, pools.pages))
    if first or pools.first_pages:
        expect("first pages", first, first_arrays(s, pools.first_pages))
    expect("open pages", open_pages, [((pools.slots, s.kv_heads, PAGE, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
    if sinks is not None:
        expect_floats("sinks", sinks, s.heads)
