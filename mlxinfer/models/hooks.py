"""Hooks that observe and change values inside a forward pass, which then runs part by part instead of fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from ..cache.attention.head_steps import separate
from ..cache.base import AttentionParams, AttentionSpec, HeadSteps, LayerSpec, OpaqueState, RecurrentUpdate, Rotation, Segment, Step
from ..kernels_cpu import Blocks
from ..nn.moe import MixtureOfExperts
from .block import AnyBlock, Block, with_deepstack

RESIDUAL, ATTENTION_OUT, HEADS, MLP = "residual", "attention_out", "heads", "mlp"
"""Places whose values a hook may change: the stream into a block (the last index is the stream out of the last block), the mixer's output
`[T, hidden]`, the heads' results before the output projection `[T, heads, dim]`, the feed-forward output."""

ROUTER = "router"
"""The router's logits `[T, experts]`, which a hook may only observe."""


class Hooks(Protocol):
    """Callbacks of a forward pass. Rows are those of a step; its segments assign them to sequences."""

    def wants(self, place: str, layer: int) -> bool:
        """Return True if `at` must be called for this place and layer."""
        ...

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        """Receive the value of a place, `[T, ...]`, and return its replacement of the same shape and dtype."""
        ...

    def attended(
        self, layer: int, qkv: Sequence[mx.array], params: AttentionParams, spec: AttentionSpec, segments: Sequence[Segment]
    ) -> None:
        """Receive queries, keys and values `[T, heads, dim]` after norm and rotation, before attention."""
        ...

    def arrays(self) -> list[mx.array]:
        """Return recorded arrays that are not evaluated, for the step to evaluate."""
        ...


class HookedStep:
    """Implements `base.Step` with hooks around attention."""

    runs_blocks = False

    def __init__(self, step: Step, hooks: Hooks, layers: Sequence[LayerSpec]) -> None:
        self.segments, self.given = step.segments, step.given
        self._step, self._hooks, self._layers = step, hooks, layers

    @property
    def positions(self) -> mx.array:
        return self._step.positions

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        spec = self._layers[layer]
        assert isinstance(spec, AttentionSpec)
        self._hooks.attended(layer, (q, k, v), params, spec, self.segments)
        return changed(self._hooks, HEADS, layer, self._step.attend(layer, q, k, v, params), self.segments)

    def attend_again(self, layer: int, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        return self._step.attend_again(layer, rows, heads, params)

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        spec = self._layers[layer]
        assert isinstance(spec, AttentionSpec)
        y = self.attend(layer, *separate(rows, spec, heads), params)
        return y.reshape(y.shape[0], -1)

    def run_blocks(
        self,
        x: mx.array,
        blocks: Blocks,
        layers: Sequence[int],
        rotations: Sequence[Rotation | None],
        recurrent: Sequence[int] = (),
        given: mx.array | None = None,
    ) -> mx.array:
        raise NotImplementedError

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        return self._step.recur(layer, inputs, update)

    def opaque(self, segment: Segment) -> OpaqueState:
        return self._step.opaque(segment)


def changed(hooks: Hooks, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
    """Return x or its replacement by the hooks."""
    return hooks.at(place, layer, x, segments) if hooks.wants(place, layer) else x


def run_blocks(
    x: mx.array, blocks: Sequence[AnyBlock], step: Step, rotations: Mapping[str, Rotation], hooks: Hooks, layers: Sequence[LayerSpec]
) -> mx.array:
    """Run rows `[T, hidden]` through all blocks with hooks. Returns the last stream before the norm."""
    segments, watched = step.segments, HookedStep(step, hooks, layers)
    for layer, block in enumerate(blocks):
        assert isinstance(block, Block)  # other kinds were refused before
        x = changed(hooks, RESIDUAL, layer, x, segments)
        rotation = None if block.rope is None else rotations[block.rope]
        y = block.mixer(x, watched, rotation, norm=block.norms.before_mixer)
        x = x + changed(hooks, ATTENTION_OUT, layer, block.added(y, block.norms.after_mixer), segments)
        _watch_router(x, block, hooks, layer, segments)
        y = block.mlp(x, norm=block.norms.before_mlp)
        x = x + changed(hooks, MLP, layer, block.added(y, block.norms.after_mlp), segments)
        x = with_deepstack(x, step, layer)
    return changed(hooks, RESIDUAL, len(blocks), x, segments)


def _watch_router(x: mx.array, block: Block, hooks: Hooks, layer: int, segments: Sequence[Segment]) -> None:
    if isinstance(block.mlp, MixtureOfExperts) and hooks.wants(ROUTER, layer):
        before = block.norms.before_mlp
        hooks.at(ROUTER, layer, block.mlp.router(x if before is None else before(x)), segments)
