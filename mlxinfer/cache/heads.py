"""Projections to heads, in plain MLX."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .base import AttentionSpec, HeadSteps


def separate(rows: Sequence[mx.array], spec: AttentionSpec, heads: HeadSteps) -> tuple[mx.array, mx.array, mx.array]:
    """`Step.attend_rows` to `Step.attend`: queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]` and values `[T, Hkv, Dv]`."""
    count, kv, dim = rows[0].shape[0], spec.kv_heads, spec.key_dim
    keys, values = kv * dim, kv * spec.value_dim
    queries = sum(piece.shape[1] for piece in rows) - keys - values
    if heads.q_norm is None and heads.k_norm is None and rows[0].shape[1] >= queries + keys:
        turned, *rest = _cut(rows, [queries + keys, values])
        turned = _rotated(turned.reshape(count, -1, dim), heads)
        q, k = mx.split(turned, [queries // dim], axis=1)
        return q, k, rest[0].reshape(count, kv, -1)
    flat_q, flat_k, flat_v = _cut(rows, [queries, keys, values])
    q, k = flat_q.reshape(count, -1, dim), flat_k.reshape(count, kv, dim)
    q, k = (x if norm is None else norm(x) for x, norm in ((q, heads.q_norm), (k, heads.k_norm)))
    return _rotated(q, heads), _rotated(k, heads), flat_v.reshape(count, kv, -1)


def _rotated(x: mx.array, heads: HeadSteps) -> mx.array:
    return x if heads.rotation is None else heads.rotation(x)


def _cut(rows: Sequence[mx.array], sizes: list[int]) -> list[mx.array]:
    """The pieces cut where one of `sizes` ends."""
    parts: list[mx.array] = []
    left = iter(sizes)
    for piece in rows:
        ends = [next(left)]
        while ends[-1] < piece.shape[1]:
            ends.append(ends[-1] + next(left))
        parts += mx.split(piece, ends[:-1], axis=-1) if len(ends) > 1 else [piece]
    return parts
