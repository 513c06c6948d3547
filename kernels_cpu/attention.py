"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .native import native


def attention_plan(segments: Sequence[tuple[int, int, int, int, int, list[int]]], window: int | None = None) -> Any:
    """Whose rows a step has and where their past lies, for every layer of one window.

    `segments` are `(slot, start, count, past, first_page, pages)`: rows `start .. start + count` are the tokens `past ..` of the
    sequence in `slot`, whose pages `first_page ..` of 64 tokens are sealed under the numbers `pages`, up to its open page.
    """
    return native().AttentionPlan(segments, window)


def paged_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    sealed: Sequence[mx.array],
    open: Sequence[mx.array],
    plan: Any,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Append k `[T, Hkv, Dk]` and v `[T, Hkv, Dv]` to the cache and attend with q `[T, Hq, Dk]`, each segment to its own past.

    `sealed` are keys and values `[Hkv, pages, 64, D]`, `open` are `[slots, Hkv, 64, D]`, in any floating dtype. Returns the answers
    `[T, Hq, Dv]`, the open pages with the new rows, and the pages that became full, `[Hkv, full, 64, D]`, one segment's after another's.

    The open pages are written in place: those passed in must not be used again. Online softmax in float32; a row's answer depends
    on its own sequence only, to the last bit, whatever the other rows, the number of rows of a step, or the threads.
    """
    out, open_keys, open_values, full_keys, full_values = native().paged_attention(
        q, k, v, sealed, open, plan, scale=scale, softcap=softcap, sinks=sinks
    )
    return out, [open_keys, open_values], [full_keys, full_values]
