"""Chooses how many rows attend to a quantized past on a GPU.

This project's kernel dequantizes pages as it reads them. MLX's attention needs the past dequantized for the layer, which takes memory, but
is faster on devices where it uses matrix units that the kernel does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from time import perf_counter

import mlx.core as mx

from ...kernels_metal.kernel_trial import MARGIN, KernelTrial, Speed, Speeds, faster_variants
from ...kernels_metal.paged_attention.arrays import sealed_arrays
from ...kernels_metal.paged_attention.plan import Pools, SegmentRows
from ...kernels_metal.paged_attention.reference import attention
from ...kernels_metal.paged_attention.tiles import Shape
from ...kernels_metal.paged_attention_prefill.launcher import paged_attention_prefill
from ...kernels_metal.paged_attention_prefill.plan import plan_prefill
from ...kernels_metal.unseal_pages.launcher import RAW, SEALED, plan_unseal, unseal_pages
from ...util.device import device_memory, has_metal
from ..base import PAGE
from .reference_chunks import FUSED_DIMS

LEAST_ROWS = 256
"""Minimum rows of a segment for dequantizing its past: fewer do not repay it, and need fewer passes of the kernel."""
_SHARE = 64
"""Maximum share of the device's memory for the copies of one layer, as a divisor."""
_ROWS, _PAST, _KV_HEADS = 512, 4096, 8
"""Rows, earlier tokens and KV heads of the measured segment."""


@cache
def most_unsealed_bytes() -> int:
    """Return the maximum bytes of one layer's dequantized past."""
    return device_memory().usable // _SHARE


def unsealed_bytes(shape: Shape, tokens: int) -> int:
    """Return the bytes of a layer's dequantized keys and values."""
    return tokens * shape.kv_heads * (shape.key_dim + shape.value_dim) * shape.dtype.size


def may_unseal(shape: Shape, tokens: int, rows: int, *, softcap: float | None, kernel: bool = True) -> bool:
    """True if the past of a segment of `rows` rows that ends after `tokens` tokens is dequantized. Without `kernel`, no kernel reads sealed
    pages, so nothing is measured."""
    if rows < LEAST_ROWS or softcap is not None or shape.key_dim != shape.value_dim or shape.key_dim not in FUSED_DIMS:
        return False
    return unsealed_bytes(shape, tokens + rows) <= most_unsealed_bytes() and (unsealing_is_faster(shape) if kernel else has_metal())


def unsealing_is_faster(shape: Shape) -> bool:
    """Compare both ways on this device, once for all layers that differ only in the number of KV heads. False unless the device is an Apple
    GPU."""
    return has_metal() and TRIAL.obstacle(replace(shape, heads=_KV_HEADS * shape.group, kv_heads=_KV_HEADS)) is not None


def _speeds(shape: Shape) -> Speeds:
    kernel, unsealed = (min(_seconds(way) for _ in range(3)) for way in (_by_kernel(shape), _by_mlx(shape)))
    return {_ROWS: Speed(unsealed / max(kernel, 1e-9), seconds=kernel)}


_choose = partial(faster_variants, least=MARGIN**-2)
"""Dequantizing takes memory, so it must be faster by the margin."""
TRIAL = KernelTrial("prompts over a quantized cache", lambda shape: None, speeds=_speeds, choose=_choose, listed=False)
"""By shape: the kernel's speed compared to dequantizing the past for MLX's attention. Both have passed the trials of attention."""


def _seconds(way: Callable[[], mx.array]) -> float:
    mx.eval(way())
    answer = way()
    begin = perf_counter()
    mx.eval(answer)
    return perf_counter() - begin


def _operands(shape: Shape) -> tuple[list[mx.array], list[mx.array]]:
    """Return queries, keys and values of the rows, and a pool. Their numbers do not affect the time."""
    own = [
        mx.zeros((_ROWS, heads, dim), shape.dtype)
        for heads, dim in ((shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
    ]
    pool = [mx.zeros(size, kind) for size, kind in sealed_arrays(shape, (_PAST + _ROWS) // PAGE)]
    mx.eval(own, pool)
    return own, pool


def _by_kernel(shape: Shape) -> Callable[[], mx.array]:
    (q, k, v), pool = _operands(shape)
    pages, filled = _PAST // PAGE, [a[:, : _ROWS // PAGE] for a in pool]
    plan = plan_prefill(shape, [SegmentRows(0, 0, _ROWS, _PAST, range(pages))], Pools(pool[0].shape[1], 0, 1), query_rows=_ROWS)
    opened = [mx.zeros((1, shape.kv_heads, PAGE, dim), shape.dtype) for dim in (shape.key_dim, shape.value_dim)]
    return lambda: paged_attention_prefill(q, k, v, pool, filled, [], opened, plan, scale=1.0)


def _by_mlx(shape: Shape) -> Callable[[], mx.array]:
    (q, *own), pool = _operands(shape)
    fresh = _ROWS // PAGE
    raw = [x.swapaxes(0, 1).reshape(shape.kv_heads, fresh, PAGE, -1) for x in own]
    places = [(SEALED, page) for page in range(_PAST // PAGE + fresh)] + [(RAW, page) for page in range(fresh)]
    plan = plan_unseal(places, (pool[0].shape[1], 0, 0, fresh))
    mask = mx.ones((_ROWS, plan.count * PAGE), mx.bool_)

    def run() -> mx.array:
        k, v = unseal_pages(pool, [], [], raw, plan, shape)
        return attention(q.swapaxes(0, 1), k, v, scale=1.0, mask=mask)

    return run
