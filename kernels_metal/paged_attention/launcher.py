"""Calls the kernels of this folder: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..append_rows.launcher import Norm, Part, check_rows
from ..append_rows.plan import AppendPlan
from ..executors import Template, get_kernel
from ..formats import v_group
from .arrays import expect, expect_floats, first_arrays, integers, nothing, sealed_arrays, settings, sink_logits
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
    shape, lacking = plan.shape, nothing(plan.shape.dtype)
    expect("queries", [q], [((plan.query_rows, shape.heads, shape.key_dim), shape.dtype)])
    _check(sealed, first, open_pages, sinks, plan)
    if recent or plan.pools.entries:
        _check_recent(recent, plan, plan.pools.entries, plan.pools.recent)
    numbers = _numbers(0, shape.heads * shape.key_dim, 0, 0, 0, 0, 0, 0, plan.pools.recent, 0, 0, 0)
    rows = [q, *[lacking] * 4, nothing(mx.float32)]
    pages = [*_inputs(sealed, first, open_pages, recent, plan), _no_entries()]
    return _attend(rows, pages, numbers, plan, settings(scale, softcap or 0.0, sinks is not None, plan.parts is not None), sinks, (0, 0))[0]


def paged_attention_append(
    parts: tuple[Part, Part, Part],
    old: Sequence[mx.array],
    append: AppendPlan,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    plan: DecodePlan,
    *,
    scale: float,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    waves: mx.array | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """`append_rows` and `paged_attention_decode` in one launch, for plans that `append`: the answers `[plan.rows, Hq, Dv]`, and the recent
    keys and values after the step. `old` are those before it, `parts` where the step's queries, keys and values lie. Raises ValueError if
    arrays do not fit the plans, or the plan does not append."""
    shape, pools = plan.shape, plan.pools
    _check(sealed, first, open_pages, sinks, plan)
    check_rows(parts, old, append, shape, (q_norm, k_norm), waves)
    if not plan.appends or (pools.entries, pools.recent) != (len(append.new), append.length) or plan.query_rows != append.rows:
        raise ValueError(f"{append.rows} rows for {len(append.new)} entries are not what this plan of {plan.query_rows} rows appends")
    (q, q_at), (k, k_at), (v, v_at) = ((part.rows, part.at) for part in parts)
    pairs = 0 if waves is None else waves.shape[2]
    lengths = append.old_length, append.length, len(append.new), len(plan.sequences)
    numbers = _numbers(1, q.shape[1], q_at, k.shape[1], k_at, v.shape[1], v_at, pairs, *lengths)
    weights = [nothing(shape.dtype) if norm is None else norm.weight for norm in (q_norm, k_norm)]
    eps = [-1.0 if norm is None else norm.eps for norm in (q_norm, k_norm)]
    rows = [q, k, v, *weights, nothing(mx.float32) if waves is None else waves]
    chosen = settings(scale, softcap or 0.0, sinks is not None, plan.parts is not None, *eps)
    pages = [*_inputs(sealed, first, open_pages, old, plan), append.entries]
    answers, *recent = _attend(rows, pages, numbers, plan, chosen, sinks, (pools.entries, pools.recent))
    return answers, recent


def _attend(
    rows: list[mx.array],
    pages: list[mx.array],
    numbers: mx.array,
    plan: DecodePlan,
    chosen: mx.array,
    sinks: mx.array | None,
    recent: tuple[int, int],
) -> list[mx.array]:
    """Answers, and the recent keys and values that the launch has made: `recent` are their entries and rows."""
    shape, logits = plan.shape, sink_logits(sinks, plan.shape.dtype)
    answers, parts, *made = _decode([*rows, *pages, plan.table, plan.work, numbers, chosen, logits], plan, recent)
    if plan.parts is not None:
        answers = get_kernel(*COMBINE)(
            inputs=[parts, plan.parts, chosen, logits],
            template=combine_template(shape),
            output_shapes=[(plan.rows, shape.heads, shape.value_dim)],
            output_dtypes=[shape.dtype],
            grid=(32, shape.heads, plan.rows),
            threadgroup=(32, 1, 1),
        )[0]
    return [answers, *made]


@lru_cache(256)
def _numbers(*numbers: int) -> mx.array:
    made = integers(numbers)
    mx.eval(made)  # it outlives the thread that made it
    return made


def _no_entries() -> mx.array:
    return _numbers(0)


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


def _decode(inputs: list[mx.array], plan: DecodePlan, recent: tuple[int, int]) -> list[mx.array]:
    """Answers, parts of answers with their logarithms, recent keys and values: what is not wanted has one element."""
    shape, threads = plan.shape, 32 * plan.tile.simdgroups
    answers = (plan.rows, shape.heads, shape.value_dim), (1, 1, 1)
    parts = (1, 1, 1), (plan.part_rows, shape.heads, shape.value_dim + 1)
    entries, length = recent
    made = [(entries, shape.kv_heads, length, dim) if entries else (1, 1, 1, 1) for dim in (shape.key_dim, shape.value_dim)]
    return get_kernel(*DECODE)(
        inputs=inputs,
        template=decode_template(shape, plan.tile),
        output_shapes=[*(each[plan.parts is not None] for each in (answers, parts)), *made],
        output_dtypes=[shape.dtype, mx.float32, shape.dtype, shape.dtype],
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
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    sinks: mx.array | None,
    plan: DecodePlan,
) -> None:
    s, pools = plan.shape, plan.pools
    expect("sealed pages", sealed, sealed_arrays(s, pools.pages))
    if first or pools.first_pages:
        expect("first pages", first, first_arrays(s, pools.first_pages))
    expect("open pages", open_pages, [((pools.slots, s.kv_heads, PAGE, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
    if sinks is not None:
        expect_floats("sinks", sinks, s.heads)


def _check_recent(recent: Sequence[mx.array], plan: DecodePlan, entries: int, length: int) -> None:
    s = plan.shape
    expect("recent rows", recent, [((entries, s.kv_heads, length, dim), s.dtype) for dim in (s.key_dim, s.value_dim)])
