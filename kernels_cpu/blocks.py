"""Decoder blocks, attention and a gated feed-forward layer each, as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .interface import AttentionPlan, Blocks, Rotation
from .native import native
from .packed import GATES, PRECISIONS, Packed

Norm = tuple[mx.array, float]
"""The weight of a root-mean-square norm, and its epsilon."""


@dataclass(frozen=True, slots=True)
class Projection:
    matrix: Packed
    bias: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """`x += after_attention(output(attend(qkv(before_attention(x)))))`, then `x += after_mlp(down(gate(gate_up(before_mlp(x)))))`.

    `qkv` are one to three projections that give queries, keys and values behind one another; `gate` is one of `GATES`. What is None
    does nothing. See `paged_attention` for the rest.
    """

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    qkv: Sequence[Projection]
    query_norm: Norm | None
    key_norm: Norm | None
    sinks: mx.array | None
    scale: float
    softcap: float | None
    output: Projection
    gate_up: Projection
    gate: str
    down: Projection


def blocks(parts: Sequence[Block], dtype: mx.Dtype) -> Blocks:
    """Blocks that follow one another, for rows of `dtype`. Raises ValueError where their sizes do not fit."""
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
    """`x` `[T, hidden]` through all blocks; `sealed`, `open`, `plans`, `rotations`, `bits` (of keys and values) and `first` are those of
    `paged_attention`, for each block.

    Returns x, and for each block the pages that became full, like `sealed` and like `first`, or nothing where there are none. The pages
    are evaluated here if they are not yet; the open ones are written in place when x is computed, so steps must be evaluated in order.
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
    """Evaluated and contiguous, as it is read without further ado."""
    if a is None:
        return None
    a = mx.contiguous(a.astype(dtype))
    mx.eval(a)
    return a
