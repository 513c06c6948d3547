"""`paged_attention_prefill.metal`: checks of its operands on the host, and its call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from .checks import Pools, checked_sizes
from .plan import PrefillPlan
from .tiling import Tiling, tiling

HERE = Path(__file__).parent
INPUTS = [
    *("q", "k", "v", "open_keys", "open_values"),
    *("pool_keys", "pool_key_scales", "pool_values", "pool_value_scales"),
    *("filled_keys", "filled_key_scales", "filled_values", "filled_value_scales"),
    *("first_keys", "first_values", "table", "tiles", "sinks", "sizes", "scale", "softcap"),
]
BODY = """
threadgroup T staged[KEYS * ((DK > DV ? DK : DV) + 8)];
Operands<T> x;
x.q = q;
x.k = k;
x.v = v;
x.open_keys = open_keys;
x.open_values = open_values;
x.pool = Page{(const device uchar*)pool_keys, pool_key_scales, (const device uchar*)pool_values, pool_value_scales};
x.filled = Page{(const device uchar*)filled_keys, filled_key_scales, (const device uchar*)filled_values, filled_value_scales};
x.first = Page{(const device uchar*)first_keys, pool_key_scales, (const device uchar*)first_values, pool_value_scales};
x.table = table;
x.sinks = sinks;
x.query_heads = sizes[0];
x.kv_heads = sizes[1];
x.pool_pages = sizes[2];
x.filled_pages = sizes[3];
x.first_pages = sizes[4];
x.scale = scale;
x.softcap = softcap;
paged_attention_prefill<T, DK, DV, K_BITS, V_BITS, V_GROUP, GROUP, HEADS, BLOCKS, SPLITS, KEYS, WINDOW, SINKS>(
    x, read_tile(tiles, threadgroup_position_in_grid.x), threadgroup_position_in_grid.y, staged, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup, out);
"""

MakeKernel = Callable[..., Any]


@cache
def header() -> str:
    """The text of the kernel's functions."""
    names = ["../include/codes.h", "../include/softmax.h", "../include/fragments.h", "stage.h", "paged_attention_prefill.metal"]
    texts = [(HERE / name).read_text(encoding="utf-8") for name in names]
    return "\n".join(text.replace("#pragma once\n", "") for text in texts)


@cache
def kernel(make: MakeKernel) -> Any:
    """The kernel object, made by `mx.fast.metal_kernel` or something that is called like it."""
    return make(name="paged_attention_prefill", input_names=INPUTS, output_names=["out"], source=BODY, header=header())


def paged_attention_prefill(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    open: Sequence[mx.array],
    pools: Pools,
    plan: PrefillPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    make: MakeKernel = mx.fast.metal_kernel,
    **options: Any,
) -> mx.array:
    """q `[rows, Hq, Dk]`, k `[rows, Hkv, Dk]`, v `[rows, Hkv, Dv]` to `[plan.count, Hq, Dv]`: the rows of the plan's segments, in order.

    A query sees every earlier page as it is sealed and its own page raw, up to itself, and of these the last `plan.window` tokens. `open`
    are the open pages `[slots, Hkv, 64, D]`: what they hold of tokens before the step is read. `softcap` and `sinks` `[Hq]` as in the
    reference. Raises ValueError for operands that the kernel does not have or that do not fit together.
    """
    sizes = checked_sizes(q, k, v, open, pools, plan)
    shape = (plan.count, q.shape[1], v.shape[2])
    if not plan.count:
        return mx.zeros(shape, q.dtype)
    layout = tiling(q.shape[1] // k.shape[1], q.shape[2], v.shape[2], q.dtype.size)
    tiles = plan.tiles(layout.rows)
    (out,) = kernel(make)(
        inputs=[q, k, v, *open, *_pool_inputs(pools, plan, q.dtype), tiles, _sinks(sinks, q.shape[1]), sizes, scale, softcap or 0.0],
        template=_template(q, k, v, pools, plan, layout, sinks is not None),
        grid=(layout.threads * tiles.shape[0], q.shape[1] // layout.heads, 1),
        threadgroup=(layout.threads, 1, 1),
        output_shapes=[shape],
        output_dtypes=[q.dtype],
        **options,
    )
    result: mx.array = out
    return result


def _template(
    q: mx.array, k: mx.array, v: mx.array, pools: Pools, plan: PrefillPlan, layout: Tiling, sinks: bool
) -> list[tuple[str, mx.Dtype | int | bool]]:
    value_dim = v.shape[2]
    return [
        ("T", q.dtype),
        ("DK", q.shape[2]),
        ("DV", value_dim),
        ("K_BITS", pools.k_bits),
        ("V_BITS", pools.v_bits),
        ("V_GROUP", value_dim if pools.v_bits == 16 else value_dim // pools.sealed[-1].shape[-1]),
        ("GROUP", q.shape[1] // k.shape[1]),
        ("HEADS", layout.heads),
        ("BLOCKS", layout.blocks),
        ("SPLITS", layout.splits),
        ("KEYS", layout.keys),
        ("WINDOW", plan.window or 0),
        ("SINKS", sinks),
    ]


def _pool_inputs(pools: Pools, plan: PrefillPlan, dtype: mx.Dtype) -> list[mx.array]:
    """The pools as the kernel takes them, and the table. A pool that is not there or holds no page is never read, and an array of eight
    stands for it: MLX passes smaller ones in another address space."""
    filled = list(pools.filled) or [mx.zeros((0,), a.dtype) for a in pools.sealed]
    first = list(pools.first) or [mx.zeros((0,), dtype)] * 2
    raw = pools.k_bits == pools.v_bits == 16
    table = plan.table(pools.sealed[0].shape[1], raw=raw)
    four = [*_with_scales(pools.sealed, pools), *_with_scales(filled, pools), *first]
    return [*(_placeholder(a.dtype) if not a.size else a for a in four), table]


def _with_scales(arrays: Sequence[mx.array], pools: Pools) -> list[mx.array]:
    """Codes and scales of keys, then of values; at 16 bits there are no scales."""
    given = iter(arrays)
    found = []
    for bits in (pools.k_bits, pools.v_bits):
        found += [next(given), _placeholder(mx.float16) if bits == 16 else next(given)]
    return found


@cache
def _placeholder(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((8,), dtype)


def _sinks(sinks: mx.array | None, heads: int) -> mx.array:
    if sinks is None:
        return _placeholder(mx.float32)
    sinks = sinks.astype(mx.float32)
    return sinks if heads >= 8 else mx.concatenate([sinks, mx.zeros((8 - heads,))])
