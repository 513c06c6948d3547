"""Looking into a model while it runs, and changing what it computes: one pass with hooks, part by part instead of fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from ..cache.attention.reference import separate
from ..cache.base import AttentionParams, AttentionSpec, HeadSteps, LayerSpec, OpaqueState, RecurrentUpdate, Rotation, Segment, Step
from ..kernels_cpu import Blocks
from ..nn.moe import MixtureOfExperts
from .block import AnyBlock, Block

RESIDUAL, ATTENTION_OUT, HEADS, MLP = "residual", "attention_out", "heads", "mlp"
"""Places whose values a hook may change: the stream that enters a block (and, as one more layer, the one that leaves the last), what the
mixer adds to it `[T, hidden]`, each head's result before the output projection `[T, heads, dim]`, what the feed-forward layer adds."""

ROUTER = "router"
"""The router's logits `[T, experts]`, which can only be watched."""


class Hooks(Protocol):
    """What is done on the way through a model. Rows are those of a step: its segments tell whose they are."""

    def wants(self, place: str, layer: int) -> bool:
        """Whether `at` is to be called there."""
        ...

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        """The value of a place, `[T, ...]`; returns what takes its place, of the same shape and dtype."""
        ...

    def attended(
        self, layer: int, qkv: Sequence[mx.array], params: AttentionParams, spec: AttentionSpec, segments: Sequence[Segment]
    ) -> None:
        """Told of queries, keys and values `[T, heads, dim]`, normed and rotated, before they meet the past."""
        ...

    def arrays(self) -> list[mx.array]:
        """What was kept and has not been evaluated, for the step to compute along."""
        ...


class HookedStep:
    """A step of the cache whose attention can be watched and changed. Implements `base.Step`."""

    runs_blocks = False

    def __init__(self, step: Step, hooks: Hooks, layers: Sequence[LayerSpec]) -> None:
        self.segments = step.segments
        self._step, self._hooks, self._layers = step, hooks, layers

    @property
    def positions(self) -> mx.array:
        return self._step.positions

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        spec = self._layers[layer]
        assert isinstance(spec, AttentionSpec)
        self._hooks.attended(layer, (q, k, v), params, spec, self.segments)
        return changed(self._hooks, HEADS, layer, self._step.attend(layer, q, k, v, params), self.segments)

    def attend_again(self, layer: int, q: mx.array, params: AttentionParams) -> mx.array:
        return self._step.attend_again(layer, q, params)

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
    """x, or what the hooks put in its place."""
    return hooks.at(place, layer, x, segments) if hooks.wants(place, layer) else x


def run_blocks(
    x: mx.array, blocks: Sequence[AnyBlock], step: Step, rotations: Mapping[str, Rotation], hooks: Hooks, layers: Sequence[LayerSpec]
) -> mx.array:
    """Rows `[T, hidden]` through all blocks, with hooks. Returns the last stream, not normed."""
    segments, watched = step.segments, HookedStep(step, hooks, layers)
    for layer, block in enumerate(blocks):
        assert isinstance(block, Block)  # others are refused before
        x = changed(hooks, RESIDUAL, layer, x, segments)
        rotation = None if block.rope is None else rotations[block.rope]
        y = block.mixer(x, watched, rotation, norm=block.norms.before_mixer)
        x = x + changed(hooks, ATTENTION_OUT, layer, block.added(y, block.norms.after_mixer), segments)
        _watch_router(x, block, hooks, layer, segments)
        y = block.mlp(x, norm=block.norms.before_mlp)
        x = x + changed(hooks, MLP, layer, block.added(y, block.norms.after_mlp), segments)
    return changed(hooks, RESIDUAL, len(blocks), x, segments)


def _watch_router(x: mx.array, block: Block, hooks: Hooks, layer: int, segments: Sequence[Segment]) -> None:
    if isinstance(block.mlp, MixtureOfExperts) and hooks.wants(ROUTER, layer):
        before = block.norms.before_mlp
        hooks.at(ROUTER, layer, block.mlp.router(x if before is None else before(x)), segments)
