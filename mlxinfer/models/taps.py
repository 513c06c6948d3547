"""Blocks from whose middle rows are taken, for heads that read more than the last rows. Models without such a head never come here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ..cache.base import Rotation, Step
from ..nn.residual import Stream
from .block import AnyBlock
from .fused_blocks import Run, native_form, runs

if TYPE_CHECKING:
    from .decoder import BlockStack
    from .hooks import Hooks


def tapped_runs(blocks: Sequence[AnyBlock], taps: Sequence[int], dtype: mx.Dtype) -> list[Run]:
    """The blocks in runs of which none reaches over a tap."""
    ends = [*(tap for tap in taps if 0 < tap < len(blocks)), len(blocks)]
    return [run for start, end in zip([0, *ends[:-1]], ends, strict=True) for run in runs(blocks[start:end], dtype)]


def tapped(
    stack: BlockStack,
    x: mx.array,
    step: Step,
    rotations: Mapping[str, Rotation],
    hooks: Hooks | None,
    inputs: mx.array | None,
    found: list[mx.array],
) -> mx.array:
    """`BlockStack.advance`, which also adds the rows that enter the blocks `stack.taps` to `found`. What hooks change is not drafted for:
    the head then reads zeros."""
    if hooks is not None:
        found += [mx.zeros_like(x)] * len(stack.taps)
        return stack.advance(x, step, rotations, hooks, inputs)
    if stack.joined and inputs is None:
        return _streamed(stack, x, step, rotations, found)
    at = 0
    for run in stack.runs:
        native = native_form(run, step)
        if native is not None:
            found += [x] * (at in stack.taps)
            turns = [None if rope is None else rotations[rope] for rope in run.ropes]
            x = step.run_blocks(x, native, run.layers, turns, run.recurrent)
            at += len(run.blocks)
            continue
        for block in run.blocks:
            found += [x] * (at in stack.taps)
            x = block(x, step, rotations, None if inputs is None else inputs[at])
            at += 1
    found += [x] * (at in stack.taps)
    return x


def _streamed(stack: BlockStack, x: mx.array, step: Step, rotations: Mapping[str, Rotation], found: list[mx.array]) -> mx.array:
    """The same where sums and norms are one kernel, between the taps."""
    stream = Stream(x)
    for at, block in enumerate(stack.blocks):
        if at in stack.taps:
            stream = Stream(stream.sum())
            found.append(stream.x)
        stream = block.advance(stream, step, rotations)
    x = stream.sum()
    found += [x] * (len(stack.blocks) in stack.taps)
    return x
