"""Softmax attention on a flat row of tokens. The cache stores keys and values, and decides which tokens attend to which."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..cache.base import AttentionParams, HeadNorm, HeadSteps, Rotation, Segment, Step
from ..kernels_cpu import Packed
from ..util.dataclass import dataclass
from .linear import JoinedLinear, Linear, NamedProjection
from .norms import RMSNorm
from .rope import Rope
from .weights import Weights, map_rows


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention layer: queries `[T, count, dim]`, keys and values `[T, kv, dim]`."""

    hidden: int
    """Channels of the residual stream."""
    count: int
    kv: int
    dim: int

    @property
    def sizes(self) -> list[int]:
        """Output channels of the query, key and value projections."""
        return [self.count * self.dim, self.kv * self.dim, self.kv * self.dim]


def load_qkv(
    weights: Weights, name: str, heads: Heads, *, bias: bool = False, interleaved: int = 0, queries_apart: bool = False
) -> JoinedLinear:
    """Load `q_proj`, `k_proj` and `v_proj`, joined. The first `interleaved` channels of a head rotate in neighbouring pairs; see
    `paired_by_halves`. With `queries_apart`, keys and values are a separate product, for callers that need no queries."""
    names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    parts = [Linear.load(weights, part, size, heads.hidden, bias=bias) for part, size in zip(names, heads.sizes, strict=True)]
    if interleaved:
        parts[:2] = [paired_by_halves(part, heads.dim, 0, interleaved) for part in parts[:2]]
    if queries_apart:
        return JoinedLinear.apart([JoinedLinear(parts[:1], heads.sizes[:1]), JoinedLinear(parts[1:], heads.sizes[1:])])
    return JoinedLinear(parts, heads.sizes)


def paired_by_halves(linear: Linear, dim: int, first: int, turned: int) -> Linear:
    """Reorder a projection to heads of `dim` channels, of which `turned`, from channel `first`, rotate in pairs (2i, 2i + 1).

    In the new order the pairs are (i, i + turned / 2), as `Rope` expects. Scores do not change if queries and keys are reordered alike.
    """
    matrix = linear.matrix
    assert not isinstance(matrix, Packed)
    order = np.arange(matrix.shape[-2]).reshape(-1, dim)
    rotated = order[:, first : first + turned]
    order[:, first : first + turned] = np.concatenate([rotated[:, ::2], rotated[:, 1::2]], axis=1)
    rows = mx.array(order.reshape(-1))
    named = tuple(NamedProjection(each.name, each.rows, order.reshape(-1)) for each in linear.projections)  # one: nothing is joined yet
    return Linear(map_rows(matrix, lambda array: array[rows]), None if linear.bias is None else linear.bias[rows], named)


def load_output(weights: Weights, name: str, heads: Heads, *, bias: bool = False) -> Linear:
    """Load `o_proj`."""
    return Linear.load(weights, f"{name}.o_proj", heads.hidden, heads.count * heads.dim, bias=bias)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Scales up queries at late positions, by `1 + beta * log(1 + floor(position / length))` (Llama 4)."""

    beta: float
    length: int
    """Positions per step of the factor, which is 1 for the first `length`."""

    def beyond(self, segments: Sequence[Segment]) -> bool:
        """True if any row's factor is not 1."""
        return any(segment.past + segment.count > self.length for segment in segments)

    def at(self, step: Step) -> mx.array:
        """Return the factors, float32 `[T, 1, 1]`."""
        turns = mx.floor(step.positions.astype(mx.float32) / self.length)
        return (1 + self.beta * mx.log1p(turns))[:, None, None]


class Attention:
    """Attention of one layer. Options that a family does not use keep their defaults and cost nothing.

    `layer` is the layer's index in the cache. Without a `rope`, positions are not encoded. `q_norm` and `k_norm` apply per head, or to the
    whole width with `wide_norms`. `query_gain` `[dim]` multiplies queries after rotation, and so does `temperature`. `scale`, `softcap` and
    `sinks` `[heads]` become its `AttentionParams`.
    """

    def __init__(
        self,
        layer: int,
        heads: Heads,
        qkv: JoinedLinear,
        output: Linear,
        *,
        rope: Rope | None,
        scale: float | None = None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        wide_norms: bool = False,
        query_gain: mx.array | None = None,
        temperature: Temperature | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> None:
        self.layer = layer
        self.heads = heads
        self.qkv = qkv
        self.output = output
        self.q_norm, self.k_norm = q_norm, k_norm
        self.wide_norms = wide_norms
        self.rotates = rope is not None
        scale = heads.dim**-0.5 if scale is None else scale
        self.query_gain = query_gain
        self.temperature = temperature
        if rope is not None and rope.gain != 1.0:
            # A gain on queries and keys multiplies the scores by its square. If only some channels rotate, their queries are scaled
            # instead.
            if rope.dims == heads.dim:
                scale *= rope.gain**2
            else:
                gain = np.ones(heads.dim, np.float32)
                gain[: rope.dims] = rope.gain**2
                self.query_gain = mx.array(gain) if query_gain is None else query_gain * mx.array(gain)
        self.params = AttentionParams(scale, softcap, sinks)

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        return self.output(self._mixed(x, step, rotation, norm), onto=onto)

    def result_and_bias(self, x: mx.array, step: Step, rotation: Rotation | None) -> tuple[mx.array, mx.array | None]:
        """Return the result `[T, hidden]` without the bias of `output`, and that bias: see `Linear.product_and_bias`."""
        return self.output.product_and_bias(self._mixed(x, step, rotation, None))

    def _mixed(self, x: mx.array, step: Step, rotation: Rotation | None, norm: RMSNorm | None) -> mx.array:
        """Map `[T, hidden]` to `[T, heads * dim]`, the input of `output`."""
        turning = rotation if self.rotates else None
        if self.query_gain is not None or self._is_hot(step):
            q, k, v = self.heads_of(*self.qkv(x, norm=norm), rotation=turning)
            return self.attend(q, k, v, step)
        if self.wide_norms:
            rows, steps = self._normed(*self.qkv(x, norm=norm)), HeadSteps(rotation=turning)
        else:
            rows, bias = self.qkv.runs_and_bias(x, norm=norm)
            steps = HeadSteps(self.q_norm, self.k_norm, turning, bias)
        return step.attend_rows(self.layer, rows, steps, self.params)

    def _normed(self, q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [self.q_norm(q), self.k_norm(k), v] if self.q_norm and self.k_norm else [q, k, v]

    def heads_of(self, q: mx.array, k: mx.array, v: mx.array, *, rotation: Rotation | None) -> list[mx.array]:
        """Convert flat projections `[T, heads * dim]` to normed and rotated heads `[T, heads, dim]`."""
        heads, rows = self.heads, q.shape[0]
        if self.wide_norms:
            q, k, v = self._normed(q, k, v)
        q, k, v = q.reshape(rows, heads.count, heads.dim), k.reshape(rows, heads.kv, heads.dim), v.reshape(rows, heads.kv, heads.dim)
        if not self.wide_norms:
            q, k, v = self._normed(q, k, v)
        return [q, k, v] if rotation is None else [rotation(q), rotation(k), v]

    def attend(self, q: mx.array, k: mx.array, v: mx.array, step: Step) -> mx.array:
        """Attend with heads `[T, heads, dim]`; returns `[T, heads * dim]`."""
        if self.query_gain is not None:
            q = (q * self.query_gain).astype(q.dtype)
        if self.temperature is not None and self._is_hot(step):
            q = (q * self.temperature.at(step)).astype(q.dtype)
        y = step.attend(self.layer, q, k, v, self.params)
        return y.reshape(q.shape[0], -1)

    def _is_hot(self, step: Step) -> bool:
        return self.temperature is not None and self.temperature.beyond(step.segments)
