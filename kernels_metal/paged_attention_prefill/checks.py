"""What `paged_attention_prefill` refuses, before anything reaches the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .plan import PAGE, PrefillPlan

BITS = (16, 8, 6, 5, 4, 3, 2)
MAX_DIM = 512
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Pools:
    """What sealed pages lie in: keys before values, and codes before scales, as the layer's store has them. `filled` is what this step has
    sealed, in the same form, one segment's pages after another's; `first` is the first pages' own pool at 16 bits. Both may be empty."""

    sealed: Sequence[mx.array]
    k_bits: int
    v_bits: int
    filled: Sequence[mx.array] = ()
    first: Sequence[mx.array] = ()


def checked_sizes(q: mx.array, k: mx.array, v: mx.array, open: Sequence[mx.array], pools: Pools, plan: PrefillPlan) -> mx.array:
    """The kernel's `sizes`; raises ValueError."""
    rows, heads, key_dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    if q.dtype not in DTYPES or any(a.dtype != q.dtype for a in (k, v, *open)):
        raise ValueError(f"queries, keys, values and open pages have to be of one of {_names(DTYPES)}, all the same")
    if k.shape != (rows, kv_heads, key_dim) or v.shape[0] != rows or not kv_heads or heads % kv_heads:
        raise ValueError(f"queries {q.shape}, keys {k.shape} and values {v.shape} do not belong together")
    for dim in (key_dim, value_dim):
        if dim % 8 or not 0 < dim <= MAX_DIM:
            raise ValueError(f"heads of {dim} channels: the kernel has multiples of 8 up to {MAX_DIM}")
    if plan.rows > rows:
        raise ValueError(f"the plan has {plan.rows} rows, the step {rows}")
    for pages, dim in zip(open, (key_dim, value_dim), strict=True):
        if pages.shape[0] < plan.slots or pages.shape[1:] != (kv_heads, PAGE, dim):
            raise ValueError(f"open pages {pages.shape}: expected [{plan.slots} or more, {kv_heads}, {PAGE}, {dim}]")
    _check_pools(pools, plan, kv_heads, (key_dim, value_dim), q.dtype)
    pages = [a.shape[1] if a is not None else 0 for a in (_head(pools.sealed), _head(pools.filled), _head(pools.first))]
    return mx.array([heads, kv_heads, *pages, 0, 0, 0], mx.int32)


def _head(arrays: Sequence[mx.array]) -> mx.array | None:
    return arrays[0] if arrays else None


def _check_pools(pools: Pools, plan: PrefillPlan, kv_heads: int, dims: tuple[int, int], dtype: mx.Dtype) -> None:
    for bits in (pools.k_bits, pools.v_bits):
        if bits not in BITS:
            raise ValueError(f"{bits} bits: the kernel has {', '.join(map(str, BITS))}")
    raw = pools.k_bits == pools.v_bits == 16
    if plan.first16 and not raw and (plan.highest_first >= 0) and not pools.first:
        raise ValueError("the plan has first pages in a pool of their own, which is not there")
    _check_pool("sealed", pools.sealed, _page_arrays(pools, dims, dtype), kv_heads, plan.highest_page + 1)
    if pools.filled or not raw:
        _check_pool("filled", pools.filled, _page_arrays(pools, dims, dtype), kv_heads, plan.filled)
    if pools.first:
        plain = [((dims[0], PAGE), dtype), ((PAGE, dims[1]), dtype)]
        _check_pool("first", pools.first, plain, kv_heads, plan.highest_first + 1)


Shape = tuple[int, ...]


def _page_arrays(pools: Pools, dims: tuple[int, int], dtype: mx.Dtype) -> list[tuple[Shape, mx.Dtype]]:
    """Shape and dtype of one page of one KV head, for each array of a pool. The group of values that share a scale is the caller's choice."""
    key_dim, value_dim = dims
    arrays: list[tuple[Shape, mx.Dtype]] = [((key_dim, PAGE), dtype)]
    if pools.k_bits < 16:
        arrays = [((key_dim, 2 * pools.k_bits), mx.uint32), ((2, key_dim), mx.float16)]
    if pools.v_bits == 16:
        return [*arrays, ((PAGE, value_dim), dtype)]
    groups = pools.sealed[-1].shape[-1] if pools.sealed else 0
    if not groups or value_dim % groups or value_dim // groups % 8:
        raise ValueError(f"values of {value_dim} channels with {groups} scales: groups have to be multiples of 8")
    return [*arrays, ((PAGE, -(-value_dim * pools.v_bits // 32)), mx.uint32), ((2, PAGE, groups), mx.float16)]


def _check_pool(name: str, arrays: Sequence[mx.array], pages: list[tuple[Shape, mx.Dtype]], kv_heads: int, needed: int) -> None:
    if not arrays and not needed:
        return
    if len(arrays) != len(pages):
        raise ValueError(f"the {name} pages are {len(arrays)} arrays instead of {len(pages)}")
    count = arrays[0].shape[1]
    for a, (shape, dtype) in zip(arrays, pages, strict=True):
        if a.dtype != dtype or a.shape != (kv_heads, count, *shape):
            raise ValueError(f"{name} pages {a.dtype} {a.shape}: expected {dtype} {(kv_heads, count, *shape)}")
    if count < needed:
        raise ValueError(f"page {needed - 1} of {count} {name} pages")


def _names(dtypes: Sequence[mx.Dtype]) -> str:
    return ", ".join(str(d).rpartition(".")[2] for d in dtypes)
