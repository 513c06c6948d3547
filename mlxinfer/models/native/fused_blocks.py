"""Groups consecutive blocks that the CPU kernels compute as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx

from ... import kernels_cpu
from ...nn.attention import Temperature
from ...nn.packing import holders
from ...util.dataclass import dataclass
from ..block import AnyBlock, Block, ParallelBlock, SingleBlock
from .cpu_program import Accumulator, NotNative, PagesElsewhere, ProgramBuilder


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks, with their program for the CPU kernels if supported."""

    blocks: Sequence[AnyBlock]
    native: kernels_cpu.Blocks | None = None
    layers: Sequence[int] = ()
    """Cache indices of the attention layers."""
    ropes: Sequence[str | None] = ()
    """Rope key of each attention layer; None without rotation."""
    temperatures: Sequence[Temperature] = ()
    """Temperatures of the attention layers, which the CPU kernels do not support."""
    recurrent: Sequence[int] = ()
    """Cache indices of the recurrent layers."""


@runtime_checkable
class NativeBlock(Protocol):
    """A family's block that adds its own instructions for the CPU kernels."""

    def as_native(self, builder: ProgramBuilder) -> None:
        """Add the block's instructions. Raises `NotNative`."""
        ...


def runs(blocks: Sequence[AnyBlock], dtype: mx.Dtype, cuts: Sequence[int] = ()) -> list[Run]:
    """Return all blocks in order, grouped into runs for rows of `dtype`. An operation does not span one of the `cuts`."""
    if not kernels_cpu.can_run_blocks():
        return [Run(blocks)] if blocks else []
    try:
        groups = _grouped(blocks, dtype, cuts)
    except PagesElsewhere:
        return [Run(blocks)]
    return [Run(same) if parts is None else _run(same, parts) for same, parts in groups]


def _run(blocks: Sequence[AnyBlock], builder: ProgramBuilder) -> Run:
    temperatures = list(dict.fromkeys(builder.temperatures))
    return Run(blocks, builder.program.finish(), builder.layers, builder.ropes, temperatures, builder.recurrent)


def _grouped(blocks: Sequence[AnyBlock], dtype: mx.Dtype, cuts: Sequence[int]) -> list[tuple[list[AnyBlock], ProgramBuilder | None]]:
    """Return groups of consecutive blocks with their instructions, or None if unsupported."""
    groups: list[tuple[list[AnyBlock], ProgramBuilder | None]] = []
    for index, block in enumerate(blocks):
        goes_on = bool(groups) and index not in cuts
        last = groups[-1][1] if goes_on else None
        builder: ProgramBuilder | None = last or ProgramBuilder(_hidden(block), dtype, len(blocks))
        if builder is not None and not _fits(block, index, builder):
            builder = None
        if goes_on and builder is last:
            groups[-1][0].append(block)
        else:
            groups.append(([block], builder))
    return groups


def _hidden(block: AnyBlock) -> int:
    norm = block.norms.before_mixer or block.norms.after_mixer
    return 0 if norm is None else norm.weight.shape[0]


def _fits(block: AnyBlock, index: int, builder: ProgramBuilder) -> bool:
    """Add a block's instructions and return True, or return False if unsupported. Raises `PagesElsewhere`."""
    matrices = [holder.matrix for holder in holders(block)]
    if not matrices or not _hidden(block) or not all(isinstance(m, kernels_cpu.Packed) for m in matrices):
        return False  # unloaded weights cannot be evaluated
    before = builder.mark()
    builder.block = index
    try:
        add_block(block, builder)
        builder.check(before)
    except PagesElsewhere:
        raise
    except (NotNative, ValueError):  # ValueError for unsupported sizes
        builder.back(before)
        return False
    return True


def add_block(block: AnyBlock, builder: ProgramBuilder) -> None:
    """Add a block's instructions. Raises `NotNative`, and ValueError for unsupported sizes."""
    stream = builder.program.stream
    if type(block) is Block:
        sink = Accumulator(builder, block.norms.after_mixer, block.residual)
        builder.mix(block.mixer, stream, block.norms.before_mixer, sink, block.rope)
        sink.finish()
        sink = Accumulator(builder, block.norms.after_mlp, block.residual)
        builder.feed_forward(block.mlp, stream, block.norms.before_mlp, sink)
        sink.finish()
    elif type(block) is SingleBlock:
        if block.mixer is not None:
            builder.mix(block.mixer, stream, block.norm, Accumulator(builder), None)
        else:
            builder.feed_forward(block.mlp, stream, block.norm, Accumulator(builder))
    elif type(block) is ParallelBlock:
        row = builder.normed(stream, block.norm)
        builder.mix(block.mixer, row, None, Accumulator(builder), block.rope)
        builder.feed_forward(block.mlp, row, None, Accumulator(builder))
    elif isinstance(block, NativeBlock):
        block.as_native(builder)
    else:
        raise NotNative
