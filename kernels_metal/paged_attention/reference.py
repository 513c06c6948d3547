"""Attention of new rows to the past in plain MLX: the reference for every kernel of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..seal_page.reference import unseal_keys, unseal_values
from .plan import DecodePlan, SegmentRows
from .tiles import PAGE


def attention_over_pages(
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
    """Like `launcher.paged_attention_decode`, in float32 and without tiles: pages are dequantized and concatenated per sequence."""
    answers = []
    for r in plan.sequences:
        keys, values = (_tokens(i, r, sealed, first, _own(r, open_pages[i], recent[i] if recent else None), plan) for i in (0, 1))
        rows = q[r.start : r.start + r.count].astype(mx.float32).swapaxes(0, 1)
        answer = attention(rows, keys, values, scale=scale, window=plan.window, softcap=softcap, sinks=sinks)
        answers.append(answer.swapaxes(0, 1).astype(q.dtype))
    return mx.concatenate(answers)


def _own(r: SegmentRows, open_pages: mx.array, recent: mx.array | None) -> mx.array:
    """Return the rows of the open page, `[Hkv, tokens, D]`, including recent rows."""
    there = r.past % PAGE + r.count
    kept = open_pages[r.slot, :, : min(there, r.kept)]
    return kept if recent is None or there <= r.kept else mx.concatenate([kept, recent[r.recent, :, : there - r.kept]], axis=1)


def _tokens(which: int, r: SegmentRows, sealed: Sequence[mx.array], first: Sequence[mx.array], own: mx.array, plan: DecodePlan) -> mx.array:
    """Return keys (0) or values (1) of one sequence, `[Hkv, tokens, D]`, from page `r.first`."""
    shape = plan.shape
    keys = 1 if shape.k_bits == 16 else 2
    pages = [
        _unsealed(which, [a[:, ~p if p < 0 else p] for a in pools], 16 if p < 0 else bits, shape.value_dim)
        for p in r.pages
        for bits in [shape.v_bits if which else shape.k_bits]
        for pools in [first[which : which + 1] if p < 0 else sealed[keys:] if which else sealed[:keys]]
    ]
    return mx.concatenate([*pages, own.astype(mx.float32)], axis=1)


def _unsealed(which: int, arrays: Sequence[mx.array], bits: int, value_dim: int) -> mx.array:
    return unseal_values(arrays, bits, value_dim) if which else unseal_keys(arrays, bits)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    mask: mx.array | None = None,
    causal: bool = True,
) -> mx.array:
    """Attend with q `[Hq, L, Dk]`, k `[Hkv, S, Dk]`, v `[Hkv, S, Dv]`: `[Hq, L, Dv]`, `S >= L`; softmax in float32.

    The rows of q are the last L of the S positions. Row i attends to the positions up to its own, limited to the last `window`; a `mask`
    `[L, S]` replaces both rules. Without a mask, `causal` False lets all rows attend to all positions. `softcap` c replaces a score s by
    `c * tanh(s / c)`. `sinks` `[Hq]` are logits in the softmax without a value.
    """
    chosen = _mask(q.shape[1], k.shape[1], window) if mask is None and causal else mask
    if softcap is None:
        sinks = None if sinks is None else sinks.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale, mask=chosen, sinks=sinks).squeeze(0)
    return _capped_attention(q, k, v, scale, softcap, sinks, chosen)


def _mask(rows: int, keys: int, window: int | None) -> mx.array | str | None:
    past = keys - rows
    if window is None or keys <= window:
        return None if rows == 1 else "causal"
    if rows == 1:
        return mx.arange(keys) >= keys - window
    distance = mx.arange(past, keys)[:, None] - mx.arange(keys)[None]
    return (distance >= 0) & (distance < window)


def _capped_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, softcap: float, sinks: mx.array | None, mask: mx.array | str | None
) -> mx.array:
    heads, rows, _ = q.shape
    groups = heads // k.shape[0]
    queries = q.reshape(k.shape[0], groups, rows, -1)
    scores = ((queries * scale) @ k[:, None].swapaxes(-1, -2)).astype(mx.float32)
    scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        mask = mx.tril(mx.ones((rows, k.shape[1]), mx.bool_), k.shape[1] - rows)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32).reshape(k.shape[0], groups, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return (weights @ v[:, None]).reshape(heads, rows, -1)
