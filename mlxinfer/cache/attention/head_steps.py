"""Operations on heads before attention, in plain MLX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from ..base import AttentionSpec, HeadSteps


def separate(rows: Sequence[mx.array], spec: AttentionSpec, heads: HeadSteps) -> tuple[mx.array, mx.array, mx.array]:
    """Turn the arguments of `Step.attend_rows` into those of `Step.attend`: queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]` and values
    `[T, Hkv, Dv]`."""
    count, kv, dim = rows[0].shape[0], spec.kv_heads, spec.key_dim
    more = heads.values
    keys, values = kv * dim, 0 if more is not None and more.from_keys else kv * spec.value_dim
    rows = with_bias(rows, heads)
    queries = sum(piece.shape[1] for piece in rows) - keys - values
    if heads.q_norm is None and heads.k_norm is None and more is None and rows[0].shape[1] >= queries + keys:
        turned, *rest = _split_at_parts(rows, [queries + keys, values])
        turned = _rotated_heads(turned.reshape(count, -1, dim), heads)
        q, k = mx.split(turned, [queries // dim], axis=1)
        return q, k, rest[0].reshape(count, kv, -1)
    flat_q, flat_k, *rest = _split_at_parts(rows, [queries, keys, values] if values else [queries, keys])
    q, k = flat_q.reshape(count, -1, dim), flat_k.reshape(count, kv, dim)
    q, k = (x if norm is None else norm(x) for x, norm in ((q, heads.q_norm), (k, heads.k_norm)))
    v = (rest[0] if rest else flat_k).reshape(count, kv, -1)
    v = v if more is None else mx.fast.rms_norm(v, None, more.eps)
    return _rotated_heads(q, heads), _rotated_heads(k, heads), v


def ready_queries(rows: mx.array, spec: AttentionSpec, heads: HeadSteps) -> mx.array:
    """Turn the rows of `Step.attend_again` into queries `[T, Hq, Dk]`."""
    q = rows.reshape(rows.shape[0], -1, spec.key_dim)
    return _rotated_heads(q if heads.q_norm is None else heads.q_norm(q), heads)


def with_bias(rows: Sequence[mx.array], heads: HeadSteps) -> Sequence[mx.array]:
    """Return the rows of `Step.attend_rows` with their bias."""
    if heads.bias is None:
        return rows
    ends = list(accumulate(piece.shape[1] for piece in rows))
    return [piece + part for piece, part in zip(rows, mx.split(heads.bias, ends[:-1]), strict=True)]


def _rotated_heads(x: mx.array, heads: HeadSteps) -> mx.array:
    return x if heads.rotation is None else heads.rotation(x)


def _split_at_parts(rows: Sequence[mx.array], sizes: list[int]) -> list[mx.array]:
    """Split the pieces at the ends of consecutive parts of these `sizes`."""
    parts: list[mx.array] = []
    left = iter(sizes)
    for piece in rows:
        ends = [next(left)]
        while ends[-1] < piece.shape[1]:
            ends.append(ends[-1] + next(left))
        parts += mx.split(piece, ends[:-1], axis=-1) if len(ends) > 1 else [piece]
    return parts
