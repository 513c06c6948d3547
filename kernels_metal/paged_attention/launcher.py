"""Calls the kernels of this folder: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..executors import Template, get_kernel
from ..formats import v_group
from .arrays import expect, expect_floats, first_arrays, nothing, sealed_arrays, settings, sink_logits
from .plan import DecodePlan
from .tiles import PAGE, DecodeTile, Shape

DECODE = ("paged_attention/paged_attention_decode.metal", "paged_attention_decode")
COMBINE = ("paged_attention/paged_attention_combine.metal", "paged_attention_combine")


def paged_attention_decode(
    q: mx.array,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    plan: DecodePlan,
    *,
    scale: float,
    recent: Sequence[mx.array] = (),
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend with q `[T, Hq, Dk]`; returns `[plan.rows, Hq, Dv]`, in the order of the plan's sequences.

    `sealed` and `first` are the pools (`first` may be empty), `open_pages` the open ones, `recent` the rows that lie apart from them
    (`append_rows`): the step's own are in either. Raises ValueError if arrays do not fit the plan.
    """
    shape = plan.shape
    _check(q, sealed, first, open_pages, recent, sinks, plan)
    logits = sink_logits(sinks, shape.dtype)
    numbers = settings(scale, softcap or 0.0, sinks is not None, plan.parts is not None)
    answers, parts = _decode([q, *_inputs(sealed, first, open_pages, recent, plan), plan.table, plan.work, numbers, logits], plan)
    if plan.parts is None:
        return answers
    return get_kernel(*COMBINE)(
        inputs=[parts, plan.parts, numbers, logits],
        template=combine_template(shape),
        output_shapes=[(plan.rows, shape.heads, shape.value_dim)],
        output_dtypes=[shape.dtype],
        grid=(32, shape.heads, plan.rows),
        threadgroup=(32, 1, 1),
    )[0]


def decode_template(shape: Shape, tile: DecodeTile) -> Template:
    """What `paged_attention_decode` is compiled for."""
    return (
        ("T", shape.dtype),
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
    )


def combine_template(shape: Shape) -> Template:
    """What `paged_attention_combine` is compiled for."""
    return (("T", shape.dtype), ("VALUE_DIM", shape.value_dim))


def _decode(inputs: list[mx.array], plan: DecodePlan) -> list[mx.array]:
    """Answers, and parts of answers with their logarithms: what is not wanted has one element."""
    shape, threads = plan.shape, 32 * plan.tile.simdgroups
    answers = (plan.rows, shape.heads, shape.value_dim), (1, 1, 1)
    parts = (1, 1, 1), (plan.part_rows, shape.heads, shape.value_dim + 1)
    return get_kernel(*DECODE)(
        inputs=inputs,
        template=decode_template(shape, plan.tile),
        output_shapes=[each[plan.parts is not None] for each in (answers, parts)],
        output_dtypes=[shape.dtype, mx.float32],
        grid=(threads, shape.kv_heads, plan.items),
        threadgroup=(threads, 1, 1),
    )


def _inputs(
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    recent: Sequence[mx.array],
    plan: DecodePlan,
) -> list[mx.array]:
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
    return [a if a.size else nothing(a.dtype) for a in pools] + [*open_pages, *(recent or [nothing(shape.dtype)] * 2)]


def _check(
    q: mx.array,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    recent: Sequence[mx.array],
    sinks: mx.array | None,
    plan: DecodePlan,
) -> None:
    s, pools = plan.shape, plan.pools
    expect("queries", [q], [((plan.query_rows, s.heads, s.key_dim), s.dtype)])
    expect("sealed pages", sealed, sealed_arrays(s, pools.pages))
    if first or pools.first_pages:
        expect("first pages", first, first_arrays(s, pools.first_pages))
    expect("open pages", open_pages, [((pools.slots, s.kv_heads, PAGE, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
    if recent or pools.entries:
        expect("recent rows", recent, [((pools.entries, s.kv_heads, pools.recent, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
    if sinks is not None:
        expect_floats("sinks", sinks, s.heads)
