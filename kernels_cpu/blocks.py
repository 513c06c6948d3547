"""Decoder blocks (attention and a gated feed-forward layer each) as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .interface import AttentionPlan, Blocks, Rotation
from .native import native
from .packed import GATES, PRECISIONS, Packed

Norm = tuple[mx.array, float]
"""Weight `[n]` and epsilon of a root-mean-square norm."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A packed matrix with an optional bias."""

    matrix: Packed
    """`[out, in]`."""
    bias: mx.array | None = None
    """`[out]`."""


@dataclass(frozen=True, slots=True)
class Block:
    """`x += after_attention(output(attend(qkv(before_attention(x)))))`, then `x += after_mlp(down(gate(gate_up(before_mlp(x)))))`.

    Optional steps that are None are skipped. See `paged_attention` for the attention itself.
    """

    before_attention: Norm | None
    """Weight `[hidden]`."""
    after_attention: Norm | None
    """Weight `[hidden]`."""
    before_mlp: Norm | None
    """Weight `[hidden]`."""
    after_mlp: Norm | None
    """Weight `[hidden]`."""
    qkv: Sequence[Projection]
    """One to three projections that yield queries, keys and values in this order."""
    query_norm: Norm | None
    """Applied to each query head, weight `[Dk]`."""
    key_norm: Norm | None
    """Applied to each key head, weight `[Dk]`."""
    sinks: mx.array | None
    """`[Hq]`: logits that take part in the softmax without a value."""
    scale: float
    """Factor of the scores."""
    softcap: float | None
    """Cap c: scores become `c * tanh(scores / c)`."""
    output: Projection
    """`[hidden, Hq * Dv]`."""
    gate_up: Projection
    """`[2 * inner, hidden]`: the gate's rows, then those of the up projection."""
    gate: str
    """An activation of `GATES`."""
    down: Projection
    """`[hidden, inner]`."""


def blocks(parts: Sequence[Block], dtype: mx.Dtype) -> Blocks:
    """Consecutive blocks, for rows of `dtype`. Raises ValueError if their sizes do not fit."""
    n = native()

    def projection(p: Projection) -> object:
        m = p.matrix
        return n.Projection(m.data, m.layout, PRECISIONS[m.precision], _vector(p.bias, dtype))

    def norm(pair: Norm | None) -> object:
        return None if pair is None else n.Norm(_vector(pair[0], dtype), pair[1])

    return n.blocks(
        [
            n.Block(
                [norm(pair) for pair in (b.before_attention, b.after_attention, b.before_mlp, b.after_mlp)],
                [projection(p) for p in b.qkv],
                [norm(b.query_norm), norm(b.key_norm)],
                _vector(b.sinks, mx.float32),
                b.scale,
                b.softcap or 0.0,
                projection(b.output),
                projection(b.gate_up),
                GATES[b.gate],
                projection(b.down),
            )
            for b in parts
        ]
    )


def run_blocks(
    x: mx.array,
    blocks: Blocks,
    sealed: Sequence[Sequence[mx.array]],
    open: Sequence[Sequence[mx.array]],
    plans: Sequence[AttentionPlan],
    rotations: Sequence[Rotation | None],
    bits: Sequence[tuple[int, int]] | None = None,
    first: Sequence[Sequence[mx.array]] | None = None,
) -> tuple[mx.array, list[list[mx.array]], list[list[mx.array]]]:
    """Run x `[T, hidden]` through all blocks. `sealed`, `open`, `plans`, `rotations`, `bits` (of keys and values) and `first` are those of
    `paged_attention`, for each block.

    Returns x, and for each block the newly filled pages, like `sealed` and like `first`, or empty lists. The pages are evaluated here if
    they are not yet; the open ones are written in place when x is computed, so steps must be evaluated in order.
    """
    bits = [(16, 16)] * len(sealed) if bits is None else bits
    first = [()] * len(sealed) if first is None else first
    y, *full = native().run_blocks(x, blocks, sealed, open, first, bits, plans, rotations)
    if not full:
        return y, [[]] * len(sealed), [[]] * len(sealed)
    left = iter(full)
    filled, filled_first = [], []
    for plan, pages, first_pages in zip(plans, sealed, first, strict=True):
        filled.append([next(left) for _ in pages] if plan.full_pages else [])
        filled_first.append([next(left) for _ in first_pages] if plan.full_pages else [])
    return y, filled, filled_first


def _vector(a: mx.array | None, dtype: mx.Dtype) -> mx.array | None:
    """Evaluated and contiguous, because the operation reads its memory directly."""
    if a is None:
        return None
    a = mx.contiguous(a.astype(dtype))
    mx.eval(a)
    return a
