"""Launches of MLX's fused operations and of custom kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .graph import Node
from .kernels import work_of
from .layout import Laid
from .primitives import Architecture, Launch, Outcome, after, made, ready


def norm(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/normalization.cpp: rows must follow one another."""
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


def delta(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/gated_delta_update.cpp: results are filled with zeros, then one launch over arrays without gaps."""
    launches: list[Launch] = []
    inputs = [ready(a, node.name, launches, fine=a.in_rows) for a in inputs]
    launches.append(Launch(f"fill for {node.name}", 0, outputs[0].bytes, 1))
    stage = max(after(inputs), 2)
    launches.append(Launch(node.name, sum(a.bytes for a in inputs), sum(a.bytes for a in outputs), stage))
    return launches, made(outputs, stage)


def rope(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/rope.cpp: a copy first if only a part of a head turns, or if the kernel does not support the gaps of the input."""
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
    """metal/scaled_dot_product_attention.cpp. Up to 8 rows, each query head reads the keys and values of its KV head. More rows use tiles
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
    if not few:  # written as [B, L, H, D], so the next transposition is free
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
    """metal/custom_kernel.cpp: inputs with gaps are copied. `kernels.py` has the reads of each kernel."""
    launches: list[Launch] = []
    details = node.details
    whole = [ready(a, details["kernel"], launches, fine=a.in_rows or not details["ensures"]) for a in inputs]
    stage = after(whole)
    work: dict[str, Any] = work_of(details, dict(zip(details["names"], whole, strict=True)), outputs)
    launches.append(Launch(details["kernel"], writes=sum(a.bytes for a in outputs), stage=stage, source=details["source"], **work))
    return launches, made(outputs, stage)
