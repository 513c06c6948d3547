"""Groups neighbouring blocks that the CPU kernels can compute as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx

from ... import kernels_cpu
from ...nn.attention import Temperature
from ...nn.packing import holders
from ...util.dataclass import dataclass
from ..block import AnyBlock, Block, ParallelBlock, SingleBlock
from .cpu_program import NotNative, PagesElsewhere, Parts, Sink


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks, with their form for the CPU kernels if these can compute them."""

    blocks: Sequence[AnyBlock]
    """The blocks, in order."""
    native: kernels_cpu.Blocks | None = None
    """The same blocks for the CPU kernels, or None."""
    layers: Sequence[int] = ()
    """Indices of their attention layers in the cache, for the CPU kernels."""
    ropes: Sequence[str | None] = ()
    """Key of each attention layer's rope, None where it does not rotate, for the CPU kernels."""
    temperatures: Sequence[Temperature] = ()
    """Those of its attention layers: the CPU kernels know none."""
    recurrent: Sequence[int] = ()
    """Indices of their recurrent layers in the cache, for the CPU kernels."""


@runtime_checkable
class NativeBlock(Protocol):
    """A block of one family's own that says what it is for the CPU kernels."""

    def as_native(self, parts: Parts) -> None:
        """Adds its instructions. Raises `NotNative`."""
        ...


def runs(blocks: Sequence[AnyBlock], dtype: mx.Dtype, cuts: Sequence[int] = ()) -> list[Run]:
    """All blocks in order, grouped into runs, for rows of `dtype`. No operation of several blocks reaches over one of the `cuts`."""
    if not kernels_cpu.can_run_blocks():
        return [Run(blocks)] if blocks else []
    try:
        groups = _grouped(blocks, dtype, cuts)
    except PagesElsewhere:
        return [Run(blocks)]
    return [Run(same) if parts is None else _run(same, parts) for same, parts in groups]


def _run(blocks: Sequence[AnyBlock], parts: Parts) -> Run:
    temperatures = list(dict.fromkeys(parts.temperatures))
    return Run(blocks, parts.program.finish(), parts.layers, parts.ropes, temperatures, parts.recurrent)


def _grouped(blocks: Sequence[AnyBlock], dtype: mx.Dtype, cuts: Sequence[int]) -> list[tuple[list[AnyBlock], Parts | None]]:
    """Neighbours with their instructions, or with None where the CPU kernels cannot compute them."""
    groups: list[tuple[list[AnyBlock], Parts | None]] = []
    for index, block in enumerate(blocks):
        goes_on = bool(groups) and index not in cuts
        last = groups[-1][1] if goes_on else None
        parts: Parts | None = last or Parts(_hidden(block), dtype, len(blocks))
        if parts is not None and not _fits(block, index, parts):
            parts = None
        if goes_on and parts is last:
            groups[-1][0].append(block)
        else:
            groups.append(([block], parts))
    return groups


def _hidden(block: AnyBlock) -> int:
    norm = block.norms.before_mixer or block.norms.after_mixer
    return 0 if norm is None else norm.weight.shape[0]


def _fits(block: AnyBlock, index: int, parts: Parts) -> bool:
    """Adds the instructions of the block, if the kernels can compute it. Raises `PagesElsewhere`."""
    matrices = [holder.matrix for holder in holders(block)]
    if not matrices or not _hidden(block) or not all(isinstance(m, kernels_cpu.Packed) for m in matrices):
        return False  # what is not loaded cannot be evaluated
    before = parts.mark()
    parts.block = index
    try:
        add_block(block, parts)
        parts.check(before)
    except PagesElsewhere:
        raise
    except (NotNative, ValueError):  # the second for sizes that the kernels do not take
        parts.back(before)
        return False
    return True


def add_block(block: AnyBlock, parts: Parts) -> None:
    """Adds the instructions of a block. Raises `NotNative`, and ValueError for sizes that the kernels do not take."""
    stream = parts.program.stream
    if type(block) is Block:
        sink = Sink(parts, block.norms.after_mixer, block.residual)
        parts.mix(block.mixer, stream, block.norms.before_mixer, sink, block.rope)
        sink.finish()
        sink = Sink(parts, block.norms.after_mlp, block.residual)
        parts.feed_forward(block.mlp, stream, block.norms.before_mlp, sink)
        sink.finish()
    elif type(block) is SingleBlock:
        if block.mixer is not None:
            parts.mix(block.mixer, stream, block.norm, Sink(parts), None)
        else:
            parts.feed_forward(block.mlp, stream, block.norm, Sink(parts))
    elif type(block) is ParallelBlock:
        row = parts.normed(stream, block.norm)
        parts.mix(block.mixer, row, None, Sink(parts), block.rope)
        parts.feed_forward(block.mlp, row, None, Sink(parts))
    elif isinstance(block, NativeBlock):
        block.as_native(parts)
    else:
        raise NotNative
