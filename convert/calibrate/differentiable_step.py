"""A differentiable step over whole texts: implements `cache.base.Step` without a cache, in plain operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...cache.attention.head_steps import separate
from ...cache.base import (
    AttentionParams,
    AttentionSpec,
    GivenRows,
    HeadSteps,
    LayerSpec,
    OpaqueState,
    RecurrentSpec,
    RecurrentUpdate,
    Rotation,
    Segment,
)
from ...errors import ConversionError
from ...kernels_cpu import Blocks
from ...util.device import is_gpu


class DifferentiableStep:
    """A step over several texts, each from its beginning."""

    runs_blocks = False
    given: GivenRows | None = None

    def __init__(self, specs: Sequence[LayerSpec], lengths: Sequence[int]) -> None:
        self._specs = specs
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        self.segments = tuple(Segment(n, start, count, 0, count) for n, (start, count) in enumerate(zip(starts, lengths, strict=True)))
        self.positions = mx.concatenate([mx.arange(count, dtype=mx.int32) for count in lengths])

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        """Map `[T, Hq, Dk]`, `[T, Hkv, Dk]` and `[T, Hkv, Dv]` to `[T, Hq, Dv]`."""
        spec = self._specs[layer]
        assert isinstance(spec, AttentionSpec)
        parts = []
        for s in self.segments:
            rows = slice(s.start, s.start + s.count)
            parts.append(_attend(q[rows], k[rows], v[rows], spec.window, params))
        return mx.concatenate(parts)

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        """Attend as `Step.attend_rows`."""
        spec = self._specs[layer]
        assert isinstance(spec, AttentionSpec)
        y = self.attend(layer, *separate(rows, spec, heads), params)
        return y.reshape(y.shape[0], -1)

    def attend_again(self, layer: int, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """Never called: models whose layers share pages are not planned."""
        raise AssertionError

    def run_blocks(
        self,
        x: mx.array,
        blocks: Blocks,
        layers: Sequence[int],
        rotations: Sequence[Rotation | None],
        recurrent: Sequence[int] = (),
        given: mx.array | None = None,
    ) -> mx.array:
        """Never called, because `runs_blocks` is False."""
        raise AssertionError

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Run the recurrence as `Step.recur`, from zero states."""
        spec = self._specs[layer]
        assert isinstance(spec, RecurrentSpec)
        parts = []
        for s in self.segments:
            states = tuple(mx.zeros((1, *shape)) for shape in spec.shapes)
            parts.append(update(inputs[None, s.start : s.start + s.count], states)[0][0])
        return mx.concatenate(parts)

    def opaque(self, segment: Segment) -> OpaqueState:
        """Never called: architectures with a graph here have no opaque state."""
        raise ConversionError("this architecture cannot be planned for: give --bits")


def product(a: mx.array, b: mx.array) -> mx.array:
    """Return a differentiable `a @ b`. On a CPU, NumPy computes it, ten times as fast as MLX; it has no bfloat16."""
    if is_gpu() or mx.bfloat16 in (a.dtype, b.dtype):
        return a @ b
    return cast(mx.array, _product(a, b))


def _by_numpy(a: mx.array, b: mx.array) -> mx.array:
    return mx.array(np.matmul(np.array(a, copy=False), np.array(b, copy=False)))


@mx.custom_function
def _product(a: mx.array, b: mx.array) -> mx.array:
    return _by_numpy(a, b)


@_product.vjp
def _(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, mx.array]:
    a, b = primals
    return _by_numpy(cotangent, b.swapaxes(-1, -2)), _by_numpy(a.swapaxes(-1, -2), cotangent)


def linear(forward: Callable[[mx.array], mx.array], back: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Return a linear function with its own gradient."""
    function = mx.custom_function(lambda x: forward(x))
    function.vjp(lambda primals, cotangent, outputs: back(cotangent))
    return cast("Callable[[mx.array], mx.array]", function)


def _attend(q: mx.array, k: mx.array, v: mx.array, window: int | None, params: AttentionParams) -> mx.array:
    count, heads = q.shape[0], k.shape[1]
    shape = (heads, q.shape[1] // heads * count, -1)  # the queries that share a head, one after another
    queries = q.reshape(count, heads, -1, q.shape[-1]).transpose(1, 2, 0, 3).reshape(shape)
    scores = product(queries, k.transpose(1, 2, 0)) * params.scale
    if params.softcap is not None:
        scores = params.softcap * mx.tanh(scores / params.softcap)
    scores = scores.reshape(heads, -1, count, count)
    query, key = mx.arange(count)[:, None], mx.arange(count)[None]
    seen = key <= query if window is None else (key <= query) & (key > query - window)
    scores = mx.where(seen, scores, -mx.inf)
    if params.sinks is not None:
        column = mx.broadcast_to(params.sinks.astype(scores.dtype).reshape(heads, -1, 1, 1), (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    shares = mx.softmax(scores, axis=-1)[..., :count].reshape(heads, -1, count)
    y = product(shares, v.swapaxes(0, 1)).reshape(heads, -1, count, v.shape[-1])
    return y.transpose(2, 0, 1, 3).reshape(count, q.shape[1], -1)
