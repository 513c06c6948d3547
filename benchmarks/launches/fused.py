"""Launches of MLX's fused operations and of custom kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .layout import Laid
from .phantom import Node
from .primitives import Architecture, Launch, Outcome, after, made, ready

_PAGE = 64


def norm(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/normalization.cpp: rows have to lie one after another."""
    launches: list[Launch] = []
    x = inputs[0]
    fine = x.dense and x.strides[-1] == 1 and (len(x.shape) < 2 or x.shape[-2] == 1 or x.strides[-2] in (0, x.shape[-1]))
    x = ready(x, node.name, launches, fine=fine)
    stage = after([x, *inputs[1:]])
    launches.append(Launch(node.name, sum(a.bytes for a in (x, *inputs[1:])), outputs[0].bytes, stage))
    return launches, [Laid(x.shape, x.dtype, x.strides, stage)]


def whole(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/quantized.cpp, `fast::Quantize::eval_gpu`: one launch over arrays without gaps, to codes or back."""
    launches: list[Launch] = []
    inputs = [ready(a, node.name, launches, fine=a.in_rows) for a in inputs]
    stage = after(inputs)
    launches.append(Launch(node.name, sum(a.bytes for a in inputs), sum(a.bytes for a in outputs), stage))
    return launches, made(outputs, stage)


def rope(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/rope.cpp: a copy first where only a part of a head turns, or where the input has gaps that the kernel cannot walk."""
    launches: list[Launch] = []
    x = inputs[0]
    axes = len(x.shape)
    while axes > 3 and x.shape[-axes] == 1:
        axes -= 1
    heads, length, dim = math.prod(x.shape[1:-2]), x.shape[-2], x.shape[-1]
    swapped = len(x.shape) == 4 and x.strides[1] == dim and x.strides[2] == heads * dim and x.strides[0] == length * heads * dim
    fine = node.details["dims"] >= dim and (x.in_rows or axes == 3 or swapped)
    x = ready(x, node.name, launches, fine=fine)
    stage = after([x, *inputs[1:]])
    launches.append(Launch(node.name, sum(a.bytes for a in (x, *inputs[1:])), outputs[0].bytes, stage))
    return launches, made(outputs, stage)


def attention(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/scaled_dot_product_attention.cpp: up to 8 rows, each query head reads the keys and values of its KV head; more rows go in tiles
    of 32. Long pasts are cut into parts, which a second launch joins."""
    launches: list[Launch] = []
    q, k, v, *rest = inputs
    rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    few = rows <= 8
    q = ready(q, node.name, launches, fine=_queries_fit(q) if few else q.strides[-1] == 1)
    k, v = (ready(a, node.name, launches, fine=_keys_fit(a) if few else a.strides[-1] == 1) for a in (k, v))
    stage, out = after([q, k, v, *rest]), outputs[0]
    past = k.bytes + v.bytes
    passes = group * (rows if few else math.ceil(rows / 32))
    seen = keys - (rows - 1) / 2 if node.details["causal"] else keys
    operations = int(4 * q.size * seen)
    read = q.bytes + passes * past + sum(a.bytes for a in rest)
    split = few and ((gpu.size in "sd" and keys >= 1024) or (group > 1 and keys >= 4096))
    parts = 64 * out.bytes if split else out.bytes
    launches.append(Launch(node.name, read, parts, stage, (passes - 1) * past, operations=operations, on_matrix_units=not few))
    if split:
        stage += 1
        launches.append(Launch("join of SDPA", parts, out.bytes, stage))
    result = made(outputs, stage)[0]
    if not few:  # written as [B, L, H, D], so that the transposition which follows is free
        _, heads, length, dim = out.shape
        result = Laid(out.shape, out.dtype, (length * heads * dim, dim, heads * dim, 1), stage)
    return launches, [result]


def _queries_fit(q: Laid) -> bool:
    if q.in_rows:
        return True
    if 1 not in q.shape[:2]:
        return False
    heads = 1 if q.shape[0] == 1 else 0
    return q.strides[3] == 1 and q.strides[2] == q.shape[3] * q.shape[heads] and q.strides[heads] == q.shape[3]


def _keys_fit(a: Laid) -> bool:
    return a.strides[-1] == 1 and (1 in a.shape[:2] or a.strides[0] == a.strides[1] * a.shape[1])


def custom(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/custom_kernel.cpp: inputs with gaps are copied. Its bytes are those of its arrays, but for pools of pages, where its own tables
    say what it reads."""
    launches: list[Launch] = []
    details = node.details
    whole = [ready(a, details["kernel"], launches, fine=a.in_rows or not details["ensures"]) for a in inputs]
    stage = after(whole)
    named = dict(zip(details["names"], whole, strict=True))
    values = dict(zip(details["names"], details["arrays"], strict=True))
    rule = _KERNELS.get(details["kernel"])
    read, again, operations = rule(named, values, details["template"]) if rule else (sum(a.bytes for a in whole), 0, 0)
    tiled = details["kernel"] == "paged_attention_prefill"
    written = sum(a.bytes for a in outputs)
    launches.append(Launch(details["kernel"], read, written, stage, again, operations=operations, on_matrix_units=tiled))
    return launches, made(outputs, stage)


Reads = tuple[int, int, int]
"""Bytes read, those of them read again, and operations."""
_KernelRule = Callable[[dict[str, Laid], dict[str, mx.array], dict[str, Any]], Reads]


def _decode(named: dict[str, Laid], values: dict[str, mx.array], template: dict[str, Any]) -> Reads:
    """Each work item reads its pages once, for all query heads and rows; of the open page only the rows there are."""
    page, row = _page_bytes(named)
    read = tokens = 0
    for _slot, _start, count, past, _oldest, first, end, *_ in _table(values["work"], 9):
        own = end > past // _PAGE
        read += (end - first - own) * page + own * (past % _PAGE + count) * row
        tokens += count * (end - first) * _PAGE
    small = [named[name].bytes for name in named if name not in _POOLS]
    heads = named["queries"].shape[1]
    return read + sum(small), 0, 2 * tokens * heads * (template["KEY_DIM"] + template["VALUE_DIM"])


def _prefill(named: dict[str, Laid], values: dict[str, mx.array], template: dict[str, Any]) -> Reads:
    """Each tile of rows, and of heads, reads all pages that its rows see."""
    page, _ = _page_bytes(named)
    asked = distinct = operations = 0
    blocks = template["GROUP_HEADS"] // template["HEADS"]
    heads = named["queries"].shape[1]
    for _start, count, position, past, _slot, _places, _out, window in _table(values["tiles"], 8):
        last = position + count
        first = max(0, position - window + 1) // _PAGE
        asked += (last // _PAGE + 1 - first) * page * blocks
        distinct = max(distinct, (past // _PAGE + 1) * page)
        operations += 2 * count * (last - first * _PAGE) * heads * (template["KEY_DIM"] + template["VALUE_DIM"])
    small = sum(named[name].bytes for name in named if name not in _POOLS)
    return asked + small, max(asked - distinct, 0), operations


_POOLS = ("sealed_keys", "key_scales", "sealed_values", "value_scales", "first_keys", "first_values", "open_keys", "open_values")
"""Inputs of the attention kernels of which a launch reads a part."""


def _page_bytes(named: dict[str, Laid]) -> tuple[int, int]:
    """Bytes of a sealed page, and of a token in an open one, all KV heads. Arrays of 8 numbers stand for what is not there."""
    pools = {name: a for name, a in named.items() if name in _POOLS and a.size > 8}
    row = sum(a.bytes // (a.shape[0] * a.shape[2]) for name, a in pools.items() if name.startswith("open"))
    sealed = sum(a.bytes // a.shape[1] for name, a in pools.items() if not name.startswith(("open", "first")))
    return sealed or row * _PAGE, row


def _table(array: mx.array, width: int) -> list[tuple[int, ...]]:
    flat = np.array(array).reshape(-1)
    count = flat.size // width
    return [tuple(int(n) for n in each) for each in flat[: count * width].reshape(count, width)]


_KERNELS: dict[str, _KernelRule] = {"paged_attention_decode": _decode, "paged_attention_prefill": _prefill}
