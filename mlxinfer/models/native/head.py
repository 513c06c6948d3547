"""An MTP head's layer for the CPU kernels: one operation to append to its pages, one to draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ... import kernels_cpu
from ...cache.base import LayerSpec, Rotation, Step
from ...nn.attention import Attention
from ...nn.packing import holders
from ...util.dataclass import dataclass
from .cpu_program import NotNative, ProgramBuilder
from .fused_blocks import add_block

if TYPE_CHECKING:
    from ..heads.mtp import Head


@dataclass(frozen=True, slots=True)
class NativeHead:
    """Layer of an `mtp.Head`, applied to embeddings `[T, hidden]` and the rows before them."""

    follows: kernels_cpu.Blocks
    """Program that appends keys and values."""
    drafts: kernels_cpu.Blocks
    """Program of the whole layer, with the last norm if the head returns normed rows."""
    layer: int
    """Cache index of the layer."""
    rope: str | None
    """Key of the rope, or None."""

    def follow(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> None:
        """Append keys and values of the rows."""
        self._run(self.follows, embedded, before, step, rotations)

    def draft(self, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]) -> mx.array:
        """Return the rows that leave the layer, `[T, hidden]`."""
        return self._run(self.drafts, embedded, before, step, rotations)

    def _run(
        self, blocks: kernels_cpu.Blocks, embedded: mx.array, before: mx.array, step: Step, rotations: Mapping[str, Rotation]
    ) -> mx.array:
        turned = [None if self.rope is None else rotations[self.rope]]
        return step.run_blocks(embedded, blocks, [self.layer], turned, (), before.astype(embedded.dtype))


def native_head(head: Head, layers: Sequence[LayerSpec], dtype: mx.Dtype) -> NativeHead | None:
    """Return the layer of a loaded head for rows of `dtype`; None if unsupported, or if its pages skip first tokens.

    `layers` are the cache specs.
    """
    place, loaded = head.places.attention, all(isinstance(holder.matrix, kernels_cpu.Packed) for holder in holders(head))
    if not kernels_cpu.can_run_blocks() or not loaded or place is None or getattr(layers[place], "skips_first", False):
        return None
    try:
        follows, drafts = _join_program(head, dtype), _join_program(head, dtype)
        _append(head, follows)
        for block in head.blocks:
            add_block(block, drafts)
        if head.normed:
            drafts.program.norm(drafts.program.stream, (head.norm.weight, head.norm.eps), to=drafts.program.stream)
        if drafts.layers != [place] or drafts.temperatures or drafts.recurrent:
            return None
        return NativeHead(follows.program.finish(), drafts.program.finish(), drafts.layers[0], drafts.ropes[0])
    except (NotNative, ValueError):  # ValueError for unsupported sizes
        return None


def _join_program(head: Head, dtype: mx.Dtype) -> ProgramBuilder:
    """Return instructions that join embeddings and the rows before them."""
    hidden = head.norm.weight.shape[0]
    builder = ProgramBuilder(hidden, dtype)
    program = builder.program
    both = program.view("both", 2 * hidden)
    for i, (rows, norm) in enumerate(((program.stream, head.token_norm), (builder.own(hidden), head.hidden_norm))):
        program.norm(rows, (norm.weight, norm.eps), to=both.columns(i * hidden, hidden), centring=norm.centring)
    program.multiply(both, builder.projection(head.join), to=program.stream)
    return builder


def _append(head: Head, builder: ProgramBuilder) -> None:
    """Add instructions that append keys and values.

    The operation also attends, and its result is unused. The keys serve as queries because they have the fewest heads.
    """
    attention, block = head.first, head.blocks[0]
    rope = getattr(block, "rope", None)
    if type(attention) is not Attention or attention.k_norm is not None or (attention.rotates and rope is None):
        raise NotNative  # no published head has norms of keys
    program, qkv = builder.program, attention.qkv
    wanted = qkv if qkv.splits[0] else qkv.after_first()
    *_, keys, values = builder.split(wanted, program.stream, "projected", norm=block.norms.before_mixer)
    builder.fills(attention.layer, rope if attention.rotates else None)
    program.attend(keys, keys, values, values.count, step=attention.heads.dim, scale=attention.params.scale)
