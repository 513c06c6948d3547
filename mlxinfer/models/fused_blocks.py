"""Groups neighbouring blocks that the CPU kernels can compute as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import cast

import mlx.core as mx

from .. import kernels_cpu
from ..cache.base import HeadNorm, Step
from ..nn.activations import Activated
from ..nn.attention import Attention, Temperature
from ..nn.linear import Linear
from ..nn.mlp import GatedMLP
from ..nn.norms import RMSNorm
from ..records import dataclass
from .block import AnyBlock, Block


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks, with their form for the CPU kernels if these can compute them."""

    blocks: Sequence[AnyBlock]
    """The blocks, in order."""
    native: kernels_cpu.Blocks | None = None
    """The same blocks for the CPU kernels, or None."""
    layers: Sequence[int] = ()
    """Index of each block's attention layer in the cache, for the CPU kernels."""
    ropes: Sequence[str | None] = ()
    """Key of each block's rope, None where it does not rotate, for the CPU kernels."""
    temperatures: Sequence[Temperature] = ()
    """Those of its attention layers: the CPU kernels know none."""

    def warm(self, step: Step) -> bool:
        """Whether a temperature changes anything in this step, which the CPU kernels then cannot compute."""
        return any(t.beyond(step.segments) for t in self.temperatures)


def runs(blocks: Sequence[AnyBlock], dtype: mx.Dtype) -> list[Run]:
    """All blocks in order, grouped into runs, for rows of `dtype`."""
    found = []
    for is_native, group in groupby(blocks, key=lambda block: _fits(block, dtype)):
        same = list(group)
        if is_native:
            layers = [_attention(block).layer for block in same]
            ropes = [cast(Block, block).rope if _attention(block).rotates else None for block in same]
            temperatures = [t for block in same if (t := _attention(block).temperature) is not None]
            native = kernels_cpu.blocks([_native(block) for block in same], dtype)
            found.append(Run(same, native, layers, ropes, list(dict.fromkeys(temperatures))))
        else:
            found.append(Run(same))
    return found


def _attention(block: AnyBlock) -> Attention:
    assert isinstance(block, Block)
    assert isinstance(block.mixer, Attention)
    return block.mixer


def _fits(block: AnyBlock, dtype: mx.Dtype) -> bool:
    if not isinstance(block, Block):
        return False
    attention, mlp = block.mixer, block.mlp
    if type(attention) is not Attention or type(mlp) is not GatedMLP or block.residual != 1.0:
        return False
    if attention.query_gain is not None or attention.wide_norms or not isinstance(mlp.gate, Activated) or len(mlp.gate_up.linears) != 1:
        return False
    matrices = [linear.matrix for linear in (*attention.qkv.linears, attention.output, *mlp.gate_up.linears, mlp.down)]
    return mlp.gate_up.linears[0].can_gate(mlp.gate.activation) and all(
        isinstance(m, kernels_cpu.Packed) and (dtype == mx.float32 or m.dtype is None or m.dtype == dtype) for m in matrices
    )


def _native(block: AnyBlock) -> kernels_cpu.Block:
    assert isinstance(block, Block)
    attention, mlp, norms = _attention(block), block.mlp, block.norms
    assert isinstance(mlp, GatedMLP)
    assert isinstance(mlp.gate, Activated)
    return kernels_cpu.Block(
        before_attention=_norm(norms.before_mixer),
        after_attention=_norm(norms.after_mixer),
        before_mlp=_norm(norms.before_mlp),
        after_mlp=_norm(norms.after_mlp),
        qkv=[_projection(linear) for linear in attention.qkv.linears],
        query_norm=_norm(attention.q_norm),
        key_norm=_norm(attention.k_norm),
        sinks=attention.params.sinks,
        scale=attention.params.scale,
        softcap=attention.params.softcap,
        output=_projection(attention.output),
        gate_up=_projection(mlp.gate_up.linears[0]),
        gate=mlp.gate.activation,
        down=_projection(mlp.down),
    )


def _norm(norm: RMSNorm | HeadNorm | None) -> tuple[mx.array, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


def _projection(linear: Linear) -> kernels_cpu.Projection:
    assert isinstance(linear.matrix, kernels_cpu.Packed)
    return kernels_cpu.Projection(linear.matrix, linear.bias)
