"""Operations: attention over pages, whole blocks, and elementwise and row-wise operations.

Each raises ValueError for wrong shapes and dtypes before it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..util.dataclass import dataclass
from .native import AttentionPlan, Blocks, Rotation, in_use, native


def attention_plan(segments: Sequence[tuple[int, int, int, int, int, list[int]]], window: int | None = None) -> AttentionPlan:
    """The rows of a step and the places of their past, for all layers of one window.

    `segments` are `(slot, start, count, past, first_page, pages)`: rows `start` to `start + count` are the tokens from `past` on of the
    sequence in `slot`. Its pages of 64 tokens from `first_page` up to its open page are sealed under the ids `pages`. An id `~p` means page
    p of the pool of first pages, which stores only page 0 of a sequence.
    """
    return native.attention_plan(segments, window)


def rotation(parts: Sequence[tuple[Sequence[float], int, int]]) -> Rotation:
    """Rotary embedding of a step's rows, in parts: `(radians per position [dims / 2], position of the first row, rows)`.

    A row with several positions is a part of its own, with its angles as radians and position 1.
    """
    return native.rotation(parts)


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

    `rows` are queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]` and values `[T, Hkv, Dv]`, or one to three arrays `[T, n]` with these three
    in this order. Query and key heads are normed (`norm` `[Dk]`, `eps`) and rotated when read. `open` are keys and values
    `[slots, Hkv, 64, D]` in any floating dtype.

    `sealed` has, for `k_bits` 16, keys `[Hkv, pages, Dk, 64]` in that dtype; for 8, 6, 5, 4, 3 and 2, codes uint32
    `[Hkv, pages, Dk, 2 * k_bits]` and scales float16 `[Hkv, pages, 2, Dk]` (scales, then biases). For `v_bits` 16 it has values
    `[Hkv, pages, 64, Dv]`; otherwise codes `[Hkv, pages, 64, ceil(Dv * v_bits / 32)]` and scales `[Hkv, pages, 2, 64, Dv / G]` of groups of
    G channels, the largest divisor of Dv up to 64 that is a multiple of 8. `first`, if used, has 16-bit keys and values. A query sees its
    own page unquantized, and every earlier page as sealed.

    Returns the answers `[T, Hq * Dv]`, the open pages with the new rows, and the newly filled pages, segment after segment. These are
    arrays like `sealed` and like `first`, which has the first pages of sequences.

    The open pages are written in place: do not use the arrays passed in again. Online softmax in float32. A row's answer depends only on
    its own sequence, to the last bit: not on other rows, the number of rows in a step, or the threads.
    """
    out, open_keys, open_values, *full = native.paged_attention(
        rows, sealed, open, first, (k_bits, v_bits), plan, scale, softcap, sinks, query_norm, key_norm, eps, rotation
    )
    return out, [open_keys, open_values], full[: len(sealed)], full[len(sealed) :]


@dataclass(frozen=True, slots=True)
class AfterBlocks:
    """Results of `run_blocks`."""

    rows: mx.array
    """`[T, hidden]`."""
    filled: list[list[mx.array]]
    """For each attention layer the newly filled pages, like `sealed`, or an empty list."""
    first: list[list[mx.array]]
    """For each attention layer the filled pages that are the first of their sequence, like `first`."""
    states: list[mx.array]
    """States of all recurrent layers, in the order of the argument `states`."""


def run_blocks(
    x: mx.array,
    blocks: Blocks,
    sealed: Sequence[Sequence[mx.array]],
    open: Sequence[Sequence[mx.array]],
    plans: Sequence[AttentionPlan],
    rotations: Sequence[Rotation | None],
    bits: Sequence[tuple[int, int]] | None = None,
    first: Sequence[Sequence[mx.array]] | None = None,
    states: Sequence[mx.array] = (),
    stretches: Sequence[tuple[int, int]] = (),
    given: mx.array | None = None,
    again: Sequence[bool] = (),
) -> AfterBlocks:
    """Run x `[T, hidden]` through all blocks.

    `sealed`, `open`, `plans`, `rotations`, `bits` (of keys and values) and `first` are the arguments of `paged_attention`, one for each
    attention layer. `states` are the states of all recurrent layers, float32 `[B, ...]`. The rows of their sequences are `stretches`,
    (first row, rows) each. `given` `[T, n]` has columns that blocks read in addition to x. `again` is True for attention layers that read
    the pages of an earlier layer: no page becomes full there.

    Pages that are not evaluated yet are evaluated here. Open pages are written in place when x is computed, so steps must be evaluated in
    order. States without another reference are written in place too.
    """
    bits = [(16, 16)] * len(sealed) if bits is None else bits
    first = [()] * len(sealed) if first is None else first
    rows = native.stretches(stretches) if states else None
    y, *full = native.run_blocks(x, blocks, sealed, open, first, bits, plans, rotations, list(states), rows, given)
    after, full = full[: len(states)], full[len(states) :]
    if not full:
        return AfterBlocks(y, [[]] * len(sealed), [[]] * len(sealed), after)
    left = iter(full)
    filled, filled_first = [], []
    for plan, pages, first_pages, reads in zip(plans, sealed, first, again or [False] * len(plans), strict=True):
        own = plan.full_pages and not reads
        filled.append([next(left) for _ in pages] if own else [])
        filled_first.append([next(left) for _ in first_pages] if own else [])
    return AfterBlocks(y, filled, filled_first, after)


def silu_multiply(gate: mx.array, up: mx.array) -> mx.array:
    """`gate * sigmoid(gate) * up`, both `[..., n]` in one floating dtype, computed in float32."""
    return native.silu_multiply(gate, up)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, onto: mx.array | None = None) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight` along the last axis of `[..., n]`, `weight` `[n]`, added to `onto` of the shape of x."""
    return native.rms_norm(x, weight, eps, onto)


def can_compute_towers() -> bool:
    """True if `layer_norm`, `activate` and `patch_attention` can be called; an older module lacks them."""
    return in_use() and hasattr(native, "patch_attention")


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` along the last axis of `[..., n]`; `weight` and `bias` are `[n]`."""
    return native.layer_norm(x, weight, bias, eps)


ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "silu": 3}
"""Names of activations in `nn.activations`, with their numbers in the native operation."""


def activate(x: mx.array, activation: str) -> mx.array:
    """Apply one of `ACTIVATIONS` to floats of any shape, in float32; returns them in their dtype."""
    return native.activate(x, ACTIVATIONS[activation])


def patch_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, turns: tuple[mx.array, mx.array] | None = None, parts: int = 1
) -> mx.array:
    """Attend without a mask within each element of the batch.

    Queries `[batch, rows, heads, dim]`; keys and values the same with as many or fewer heads, in the same floating dtype. `turns` are
    cosines and sines, float32 `[rows, dim]` or `[batch * rows, dim]`: each of `parts` equal parts of a query or key rotates its halves.
    Returns `[batch * rows, heads * dim]`. Everything is computed in float32, with online softmax. An answer depends on its own element of
    the batch only.
    """
    cos, sin = turns or (None, None)
    return native.patch_attention(queries, keys, values, scale, cos, sin, parts)


def argmax(x: mx.array) -> mx.array:
    """uint32 `[...]`: index of the highest number in each row of float32 `[..., n]`, the first of equal numbers. NaN is skipped."""
    return native.argmax(x)


def masked(x: mx.array, allowed: mx.array) -> mx.array:
    """float32 `[R, n]`: x `[R, n]`, with minus infinity where the bit in uint32 `[R, ceil(n / 32)]`, lowest first, is not set."""
    return native.masked(x, allowed)


def can_mask() -> bool:
    """True if `masked` can be called; an older module lacks it."""
    return in_use() and hasattr(native, "masked")


def threshold(logits: mx.array, top_k: mx.array, top_p: mx.array) -> mx.array:
    """float32 `[R]`: in each row of float32 `[R, n]`, the lowest logit kept by top-k, then top-p.

    `top_k` and `top_p` are `[R]`. A top_k of at least n and a top_p of at least 1 keep everything; both together yield minus infinity.
    A token is kept if the tokens before it have less than top_p together, so at least one token is kept.
    """
    return native.threshold(logits, top_k, top_p)
