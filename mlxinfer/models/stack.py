"""The blocks of a model without what comes before and after them, all of them or a part: the rest may be on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import mlx.core as mx

from ..cache.base import AttentionSpec, Elsewhere, LayerSpec, RecurrentSpec, Rotation, Step
from ..nn.kernel_trial import kernels_in_use
from ..nn.packing import objects
from ..nn.residual import Stream
from ..nn.weights import Weights
from ..records import dataclass
from .block import AnyBlock
from .fused_blocks import runs

if TYPE_CHECKING:
    from .decoder import Architecture
    from .hooks import Hooks


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive blocks of a model."""

    first: int
    """The first of them."""
    last: int
    """The first block that is no longer among them."""
    share: int = 0
    """Where every machine has a share of all blocks: which of them this is."""
    shares: int = 1
    """How many shares there are; with 1, blocks are whole."""


class Rest(Protocol):
    """The blocks after those of this process."""

    def __call__(self, x: mx.array, step: Step, inputs: mx.array | None, adapters: Sequence[tuple[int, int]] = ()) -> mx.array:
        """Rows `[T, hidden]` and the inputs of all blocks to rows `[T, hidden]`, of which those are right that the step's segments ask for
        (`Segment.read`). `adapters` are the places of adapters, from 1, and how many rows each is for."""
        ...


class BlockStack:
    """Consecutive blocks and their ropes. `layers` has an entry for every layer of the whole model; those of other blocks are
    `Elsewhere`."""

    def __init__(
        self, plan: Architecture, weights: Weights, dtype: mx.Dtype, ready: Callable[[object], None], part: Part | None = None
    ) -> None:
        """`dtype` is that of the rows; `ready` is called with each block. Without a `part` it has all blocks."""
        self.part = part or Part(0, plan.sizes.layers)
        self.hidden_size = plan.sizes.hidden
        self.ropes = dict(plan.ropes)
        self.blocks: list[AnyBlock] = []
        for layer in range(self.part.first, self.part.last):
            self.blocks.append(plan.block(weights, layer))
            ready(self.blocks[-1])
        self.layers: tuple[LayerSpec, ...] = plan.specs if part is None or part.shares > 1 else only(plan.specs, layers_of(self.blocks))
        self.runs = runs(self.blocks, dtype)
        self.joined = kernels_in_use()
        """Whether sums and norms between the parts are one kernel."""
        self.rest: Rest | None = None
        """The blocks that come after these, where they are on other machines."""
        self.spread: Rest | None = None
        """Gives the rows that come from the embedding to the machines that have the other shares of these blocks."""

    def rotations(self, step: Step) -> dict[str, Rotation]:
        """How the rows of a step are rotated, by key of `ropes`."""
        return {name: rope.at(step) for name, rope in self.ropes.items()}

    def advance(
        self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], hooks: Hooks | None = None, inputs: mx.array | None = None
    ) -> Stream:
        """Rows `[T, hidden]` through these blocks; keys, values and states go to the cache. `inputs` `[blocks, T, n]` are those of each
        block, for families that have such."""
        if self.joined and hooks is None and inputs is None:
            stream = Stream(x)
            for block in self.blocks:
                stream = block.advance(stream, step, rotations)
            return stream
        if hooks is not None and inputs is None:
            from .hooks import run_blocks

            return Stream(run_blocks(x, self.blocks, step, rotations, hooks, self.layers))
        if inputs is not None:
            for block, own in zip(self.blocks, inputs, strict=True):
                x = block(x, step, rotations, own)
            return Stream(x)
        for run in self.runs:
            native = run.natively(step)
            if native is not None:
                turns = [None if rope is None else rotations[rope] for rope in run.ropes]
                x = step.run_blocks(x, native, run.layers, turns, run.recurrent)
            else:
                for block in run.blocks:
                    x = block(x, step, rotations)
        return Stream(x)


def layers_of(blocks: Sequence[object]) -> set[int]:
    """The cache's layers that these blocks write or read."""
    found = {getattr(node, "layer", None) for node in objects(list(blocks))}
    return {layer for layer in found if isinstance(layer, int) and layer >= 0}


def only(specs: Sequence[LayerSpec], own: set[int]) -> tuple[LayerSpec, ...]:
    """The same layers, those that are not among `own` marked as another machine's."""
    return tuple(spec if layer in own else Elsewhere(cast("AttentionSpec | RecurrentSpec", spec)) for layer, spec in enumerate(specs))
