"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .interface import AttentionPlan, Rotation
from .native import native


def attention_plan(segments: Sequence[tuple[int, int, int, int, int, list[int]]], window: int | None = None) -> AttentionPlan:
    """The rows of a step and where their past is stored, for all layers of one window.

    `segments` are `(slot, start, count, past, first_page, pages)`: rows `start` to `start + count` are the tokens from `past` on of the
    sequence in `slot`. Its pages of 64 tokens from `first_page` up to its open page are sealed under the ids `pages`; an id `~p` means page
    p of the pool of first pages, where only page 0 of a sequence can be.
    """
    return native().attention_plan(segments, window)


def rotation(parts: Sequence[tuple[Sequence[float], int, int]]) -> Rotation:
    """Rotary embedding of a step's rows: `(radians per position [dims / 2], position of the first row, rows)` for each segment."""
    return native().rotation(parts)


def paged_attention(
    rows: Sequence[mx.array],
    sealed: Sequence[mx.array],
    open: Sequence[mx.array],
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    query_norm: mx.array | None = None,
    key_norm: mx.array | None = None,
    eps: float = 0.0,
    rotation: Rotation | None = None,
    k_bits: int = 16,
    v_bits: int = 16,
    first: Sequence[mx.array] = (),
) -> tuple[mx.array, list[mx.array], list[mx.array], list[mx.array]]:
    """Append keys and values to the cache and attend with the queries, each segment to its own past.

    `rows` are queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]` and values `[T, Hkv, Dv]`, or one to three arrays `[T, n]` that hold these three
    in this order. Query and key heads are normed (`norm` `[Dk]`, `eps`) and rotated when they are read. `open` are keys and values
    `[slots, Hkv, 64, D]` in any floating dtype.

    `sealed` has, for `k_bits` 16, keys `[Hkv, pages, Dk, 64]` in that dtype; for 8, 6, 5, 4, 3 and 2, codes uint32
    `[Hkv, pages, Dk, 2 * k_bits]` and scales float16 `[Hkv, pages, 2, Dk]` (scales, then biases). For `v_bits` 16 it has values
    `[Hkv, pages, 64, Dv]`; otherwise codes `[Hkv, pages, 64, ceil(Dv * v_bits / 32)]` and scales `[Hkv, pages, 2, 64, Dv / G]` of groups of
    G channels, the largest divisor of Dv up to 64 that is a multiple of 8. `first`, if used, has 16-bit keys and values. A query sees its
    own page unquantized, and every earlier page as sealed.

    Returns the answers `[T, Hq * Dv]`, the open pages with the new rows, and the newly filled pages, segment after segment: arrays like
    those of `sealed`, and of `first`, which then has the first pages of sequences.

    The open pages are written in place: those passed in must not be used again. Online softmax in float32; a row's answer depends only on
    its own sequence, to the last bit, whatever the other rows, the number of rows in a step, or the threads.
    """
    out, open_keys, open_values, *full = native().paged_attention(
        rows, sealed, open, first, (k_bits, v_bits), plan, scale, softcap, sinks, query_norm, key_norm, eps, rotation
    )
    return out, [open_keys, open_values], full[: len(sealed)], full[len(sealed) :]
