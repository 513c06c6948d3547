"""`append_rows` in plain MLX: norms and rotation of heads, and recent rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..paged_attention.tiles import Shape
from .launcher import Norm, RowPart
from .plan import AppendPlan


def appended(
    parts: tuple[RowPart, RowPart, RowPart],
    old: Sequence[mx.array],
    plan: AppendPlan,
    shape: Shape,
    *,
    bias: mx.array | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    waves: mx.array | None = None,
    value_eps: float | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Like `launcher.append_rows`, in float32, head by head."""
    q, k, v = made_heads(parts, shape, bias=bias, q_norm=q_norm, k_norm=k_norm, waves=waves, value_eps=value_eps)
    return q, [_recent(x, old[i] if old else None, plan) for i, x in enumerate((k, v))]


def made_heads(
    parts: tuple[RowPart, RowPart, RowPart],
    shape: Shape,
    *,
    bias: mx.array | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    waves: mx.array | None,
    value_eps: float | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]` and values `[T, Hkv, Dv]` of a step, as `appended` makes them."""
    sizes = (shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim)
    ends = np.cumsum([heads * dim for heads, dim in sizes])
    biases = [None] * 3 if bias is None else mx.split(bias, ends[:-1].tolist())
    q, k, v = (_heads(part, *size, own) for part, size, own in zip(parts, sizes, biases, strict=True))
    q, k = _turned(q, q_norm, waves).astype(shape.dtype), _turned(k, k_norm, waves).astype(shape.dtype)
    v = v if value_eps is None else mx.fast.rms_norm(v, None, value_eps)
    return q, k, v.astype(shape.dtype)


def _heads(part: RowPart, heads: int, dim: int, bias: mx.array | None) -> mx.array:
    rows = part.rows[:, part.at : part.at + heads * dim]
    return (rows if bias is None else rows + bias).reshape(-1, heads, dim).astype(mx.float32)


def _turned(x: mx.array, norm: Norm | None, waves: mx.array | None) -> mx.array:
    if norm is not None:
        x = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + norm.eps) * norm.weight.astype(mx.float32)
    if waves is None:
        return x
    half, cosines, sines = waves.shape[2], waves[:, :1], waves[:, 1:]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([low * cosines - high * sines, high * cosines + low * sines, rest], axis=-1)


def _recent(x: mx.array, old: mx.array | None, plan: AppendPlan) -> mx.array:
    entries = []
    for before, kept, start, count in np.array(plan.entries)[: 4 * len(plan.new)].reshape(-1, 4).tolist():
        rows = [x[start : start + count].swapaxes(0, 1)]
        if old is not None:
            rows = [old[before, :, :kept], *rows]
        rows.append(mx.zeros((x.shape[1], plan.length - kept - count, x.shape[2]), x.dtype))
        entries.append(mx.concatenate(rows, axis=1))
    return mx.stack(entries)
