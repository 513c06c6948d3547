"""Launches the kernels of this folder: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..append_rows.launcher import Norm, RowPart, check_head_steps, check_rows, epsilons
from ..append_rows.plan import AppendPlan
from ..executors import Launch, Template
from ..formats import v_group
from .arrays import cached_integers, expect, expect_floats, first_arrays, nothing, sealed_arrays, settings, sink_logits
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
    q_norm: Norm | None = None,
    waves: mx.array | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend with q `[T, Hq, Dk]`; returns `[plan.rows, Hq, Dv]`, in the order of the plan's sequences.

    `sealed` and `first` are the pools (`first` may be empty), `open_pages` the open pages, `recent` the recent rows (`append_rows`). The
    step's own rows are in either of the last two. Queries are first normed, then rotated by `waves` (see `append_rows`), which only plans
    with staged queries support. Raises ValueError if arrays do not fit the plan.
    """
    shape, lacking = plan.shape, nothing(plan.shape.dtype)
    makes, half = q_norm is not None or waves is not None, 0 if waves is None else waves.shape[2]
    expect("queries", [q], [((plan.query_rows, shape.heads, shape.key_dim), shape.dtype)])
    check_head_steps(shape, plan.query_rows, (q_norm,), waves)
    if makes and not plan.tile.staged_queries:
        raise ValueError("queries of this plan must be normed and rotated before")
    check_pages(sealed, first, open_pages, sinks, plan)
    if recent or plan.pools.entries:
        _check_recent(recent, plan, plan.pools.entries, plan.pools.recent)
    numbers = cached_integers(2 if makes else 0, shape.heads * shape.key_dim, 0, 0, 0, 0, 0, half, plan.pools.recent, 0, 0, 0)
    chosen = settings(scale, softcap or 0.0, sinks is not None, plan.parts is not None, -1.0 if q_norm is None else q_norm.eps)
    logits, weight = sink_logits(sinks, shape.dtype), lacking if q_norm is None else q_norm.weight
    pages = [*_inputs(sealed, first, open_pages, recent, plan), cached_integers(0)]
    result = (plan.rows, shape.heads, shape.value_dim)
    angles = nothing(mx.float32) if waves is None else waves
    inputs = [q, *[lacking] * 3, weight, lacking, angles, *pages, plan.table, plan.work, numbers, chosen, logits]
    answers, parts, *_ = _decode(plan, result, (0, 0)).run(inputs)
    return answers if plan.parts is None else _combine(plan, result).run([parts, plan.parts, chosen, logits])[0]


def paged_attention_append(
    parts: tuple[RowPart, RowPart, RowPart],
    old: Sequence[mx.array],
    append: AppendPlan,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    plan: DecodePlan,
    *,
    scale: float,
    bias: mx.array | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    waves: mx.array | None = None,
    value_eps: float | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Run `append_rows` and `paged_attention_decode` in one launch, for plans with `appends`.

    Returns the answers `[plan.rows, Hq, Dv]`, and the recent keys and values after the step. `old` are those before it, `parts` the step's
    queries, keys and values. Raises ValueError if arrays do not fit the plans, or the plan does not append.
    """
    check_pages(sealed, first, open_pages, sinks, plan)
    check_rows(parts, old, append, plan.shape, bias, (q_norm, k_norm), waves)
    launch = append_launch(
        parts,
        append,
        plan,
        scale=scale,
        has_bias=bias is not None,
        q_norm=q_norm,
        k_norm=k_norm,
        waves=waves,
        value_eps=value_eps,
        softcap=softcap,
        sinks=sinks,
    )
    vectors = [bias, *(None if norm is None else norm.weight for norm in (q_norm, k_norm))]
    rows = [*(part.rows for part in parts), *(nothing(plan.shape.dtype) if vector is None else vector for vector in vectors)]
    answers, recent = launch.run(rows, old, sealed, first, open_pages, sink_logits(sinks, plan.shape.dtype))
    return answers.reshape(plan.rows, plan.shape.heads, plan.shape.value_dim), recent


@dataclass(frozen=True, slots=True)
class AppendLaunch:
    """`paged_attention_append` for all layers of a step that differ only in their arrays. It checks nothing."""

    plan: DecodePlan
    decode: Launch
    combine: Launch | None
    """Launch that merges parts of answers; None if no sequence is divided."""
    waves: mx.array
    """Cosines and sines of the step's rows, or a placeholder."""
    fixed: list[mx.array]
    """Inputs that all layers share: the last ones of the kernel, from `entries`, without the sinks."""

    def run(
        self,
        rows: Sequence[mx.array],
        old: Sequence[mx.array],
        sealed: Sequence[mx.array],
        first: Sequence[mx.array],
        open_pages: Sequence[mx.array],
        logits: mx.array,
    ) -> tuple[mx.array, list[mx.array]]:
        """Return answers `[plan.rows, Hq * Dv]`, and the recent keys and values after the step. `rows` are the arrays of queries, keys and
        values, their bias and the norms' weights, or placeholders; `logits` come from `sink_logits`."""
        pages = _inputs(sealed, first, open_pages, old, self.plan)
        answers, parts, *recent = self.decode.run([*rows, self.waves, *pages, *self.fixed, logits])
        if self.combine is not None:
            assert self.plan.parts is not None
            answers = self.combine.run([parts, self.plan.parts, self.fixed[-1], logits])[0]
        return answers, recent


def append_launch(
    parts: tuple[RowPart, RowPart, RowPart],
    append: AppendPlan,
    plan: DecodePlan,
    *,
    scale: float,
    has_bias: bool,
    q_norm: Norm | None,
    k_norm: Norm | None,
    waves: mx.array | None,
    value_eps: float | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> AppendLaunch:
    """Return the launch of `paged_attention_append` for layers like this one. Raises ValueError if the plan does not append."""
    shape, pools = plan.shape, plan.pools
    if not plan.appends or (pools.entries, pools.recent) != (len(append.new), append.length) or plan.query_rows != append.rows:
        raise ValueError(f"{append.rows} rows for {len(append.new)} entries are not what this plan of {plan.query_rows} rows appends")
    places = [number for part in parts for number in (part.rows.shape[1], part.at)]
    lengths = append.old_length, append.length, len(append.new), len(plan.sequences)
    numbers = cached_integers(1, *places, 0 if waves is None else waves.shape[2], *lengths)
    *eps, value_norm = epsilons(q_norm, k_norm, value_eps)
    chosen = settings(scale, softcap or 0.0, sinks is not None, plan.parts is not None, *eps, has_bias, value_norm)
    wide = (plan.rows, shape.heads * shape.value_dim)
    return AppendLaunch(
        plan,
        _decode(plan, wide, (pools.entries, pools.recent)),
        _combine(plan, wide) if plan.parts is not None else None,
        nothing(mx.float32) if waves is None else waves,
        [append.entries, plan.table, plan.work, numbers, chosen],
    )


def decode_template(shape: Shape, tile: DecodeTile) -> Template:
    """Return the template arguments of `paged_attention_decode`."""
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
    """Return the template arguments of `paged_attention_combine`."""
    return (("T", shape.dtype), ("VALUE_DIM", shape.value_dim))


def _decode(plan: DecodePlan, result: tuple[int, ...], recent: tuple[int, int]) -> Launch:
    """Return a launch with these outputs: answers of the shape `result`, parts of answers with their logarithms, and recent keys and values
    (`recent`: entries, rows). Unused outputs have one element."""
    shape, threads = plan.shape, 32 * plan.tile.simdgroups
    parts = plan.part_rows, shape.heads, shape.value_dim + 4 // shape.dtype.size
    entries, length = recent
    made = [(entries, shape.kv_heads, length, dim) if entries else (1, 1, 1, 1) for dim in (shape.key_dim, shape.value_dim)]
    return Launch(
        *DECODE,
        decode_template(shape, plan.tile),
        [result if plan.parts is None else (1, 1, 1), (1, 1, 1) if plan.parts is None else parts, *made],
        [shape.dtype] * 4,
        (threads, shape.kv_heads, plan.items),
        (threads, 1, 1),
    )


def _combine(plan: DecodePlan, result: tuple[int, ...]) -> Launch:
    shape = plan.shape
    return Launch(*COMBINE, combine_template(shape), [result], [shape.dtype], (32, shape.heads, plan.rows), (32, 1, 1))


def _inputs(
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    recent: Sequence[mx.array],
    plan: DecodePlan,
) -> list[mx.array]:
    """Return the pages in the order of the kernel, with a placeholder for each missing or empty array."""
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
    if not plan.pools.pages or (first and not plan.pools.first_pages):
        pools = [a if a.size else nothing(a.dtype) for a in pools]
    return [*pools, *open_pages, *(recent or [nothing(shape.dtype)] * 2)]


def check_pages(
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    sinks: mx.array | None,
    plan: DecodePlan,
) -> None:
    """Raise ValueError unless these arrays belong to a layer of the plan."""
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
