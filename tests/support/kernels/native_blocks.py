"""The usual block of the CPU kernels, as tests describe it, and its instructions."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxinfer.kernels_cpu import Blocks, Norm, Program, ProgramProjection, View
from mlxinfer.util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """`x += after_attention(output(attend(qkv(before_attention(x)))))`, then `x += after_mlp(down(gate(gate_up(before_mlp(x)))))`."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    qkv: Sequence[ProgramProjection]
    """One to three projections that yield queries, keys and values in this order."""
    widths: Sequence[int]
    """Columns of queries, keys and values."""
    dim: int
    """Channels of a query head."""
    query_norm: Norm | None
    key_norm: Norm | None
    sinks: mx.array | None
    scale: float
    softcap: float | None
    output: ProgramProjection
    gate_up: ProgramProjection
    gate: str
    down: ProgramProjection


def blocks(parts: Sequence[Block], hidden: int, dtype: mx.Dtype) -> Blocks:
    program = Program(hidden, dtype)
    for part in parts:
        _add(part, program)
    return program.finish()


def _add(b: Block, program: Program) -> None:
    stream = program.stream
    made = [program.multiply(stream, p, f"projected {i}", norm=b.before_attention) for i, p in enumerate(b.qkv)]
    views = _split(made, b.widths)
    settings = {"scale": b.scale, "softcap": b.softcap, "sinks": b.sinks, "query_norm": b.query_norm, "key_norm": b.key_norm}
    answers = program.attend(*views, b.output.matrix.layout.k, step=b.dim, **settings)
    _join(program, b.output, answers, b.after_attention)
    inner = program.multiply(stream, b.gate_up, "gated", norm=b.before_mlp, gate=b.gate)
    _join(program, b.down, inner, b.after_mlp)


def _join(program: Program, projection: ProgramProjection, x: View, after: Norm | None) -> None:
    stream = program.stream
    if after is None:
        program.multiply(x, projection, to=stream, onto=stream)
    else:
        program.norm(program.multiply(x, projection, "part"), after, to=stream, onto=stream)


def _split(made: Sequence[View], widths: Sequence[int]) -> list[View]:
    found, left, at = [], list(made), 0
    for width in widths:
        if left and at == left[0].count:
            left.pop(0)
            at = 0
        found.append(left[0].columns(at, width) if left else View(1, width, 0, width))
        at += width
    return found
