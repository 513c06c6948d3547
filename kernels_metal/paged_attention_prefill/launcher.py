"""Launches `paged_attention_prefill`: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..executors import get_kernel
from ..formats import v_group
from ..paged_attention.arrays import expect, expect_floats, first_arrays, nothing, sealed_arrays, settings, sink_logits
from ..paged_attention.tiles import PAGE, Shape
from .plan import PrefillPlan

_PREFILL = ("paged_attention_prefill/paged_attention_prefill.metal", "paged_attention_prefill")


def paged_attention_prefill(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    sealed: Sequence[mx.array],
    filled: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    plan: PrefillPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend with q `[T, Hq, Dk]` and the step's own k `[T, Hkv, Dk]` and v `[T, Hkv, Dv]`; returns `[plan.rows, Hq, Dv]`, in the order of
    the plan.

    A query sees every earlier page sealed and its own page raw, up to itself. `sealed` and `first` are the pools (`first` may be empty);
    `filled` are the pages that this step sealed, in the form of `sealed` (may be empty); `open_pages` have the tokens of pages that were
    open before the step. Raises ValueError if arrays do not fit the plan.
    """
    shape, tile = plan.shape, plan.tile
    _check(q, k, v, sealed, filled, first, open_pages, sinks, plan)
    if not plan.count:
        return mx.zeros((0, shape.heads, shape.value_dim), shape.dtype)
    return get_kernel(*_PREFILL)(
        inputs=[
            *(q, k, v, *open_pages),
            *pool_inputs(sealed, shape),
            *pool_inputs(filled, shape),
            *(_there(a) for a in first or [nothing(shape.dtype)] * 2),
            *(plan.table, plan.tiles, settings(scale, softcap or 0.0, sinks is not None)),
            sink_logits(sinks, shape.dtype),
        ],
        template=[
            ("T", shape.dtype),
            ("KEY_DIM", shape.key_dim),
            ("VALUE_DIM", shape.value_dim),
            ("K_BITS", shape.k_bits),
            ("V_BITS", shape.v_bits),
            ("GROUP", v_group(shape.value_dim)),
            ("GROUP_HEADS", shape.group),
            ("HEADS", tile.heads),
            ("BLOCKS", tile.blocks),
            ("SPLITS", tile.splits),
            ("KEYS", tile.keys),
        ],
        output_shapes=[(plan.rows, shape.heads, shape.value_dim)],
        output_dtypes=[shape.dtype],
        grid=(tile.threads * plan.count, shape.heads // tile.heads, 1),
        threadgroup=(tile.threads, 1, 1),
    )[0]


def pool_inputs(arrays: Sequence[mx.array], shape: Shape) -> list[mx.array]:
    """Return codes and scales of keys, then of values, with a placeholder for each missing or empty array."""
    if not arrays:
        kinds = [shape.dtype if bits == 16 else mx.uint32 for bits in (shape.k_bits, shape.v_bits)]
        return [nothing(kind) for code in kinds for kind in (code, mx.float16)]
    keys = 1 if shape.k_bits == 16 else 2
    parts = (arrays[:keys], arrays[keys:])
    return [_there(a) for part in parts for a in ([*part, nothing(mx.float16)] if len(part) == 1 else part)]


def _there(array: mx.array) -> mx.array:
    return array if array.size else nothing(array.dtype)


def _check(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    sealed: Sequence[mx.array],
    filled: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    sinks: mx.array | None,
    plan: PrefillPlan,
) -> None:
    s, pools = plan.shape, plan.pools
    rows = plan.query_rows
    expect("queries", [q], [((rows, s.heads, s.key_dim), s.dtype)])
    expect("keys and values", [k, v], [((rows, s.kv_heads, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
    expect("sealed pages", sealed, sealed_arrays(s, pools.pages))
    if filled or plan.filled:
        expect("pages that became full", filled, sealed_arrays(s, plan.filled))
    if first or pools.first_pages:
        expect("first pages", first, first_arrays(s, pools.first_pages))
    expect("open pages", open_pages, [((pools.slots, s.kv_heads, PAGE, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
    if sinks is not None:
        expect_floats("sinks", sinks, s.heads)
