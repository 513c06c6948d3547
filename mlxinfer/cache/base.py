"""The contract between a model and its cache. The model asks; it never inspects.

A step is one flat row of T tokens: the segments of all sequences that take part, one after another, without padding.
The cache knows which page or state belongs to whom, makes the masks, and sees that a query reaches its own sequence only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Union

import mlx.core as mx

from ..kernels_cpu import Blocks
from .pages import PAGE as PAGE


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer whose past is keys and values. `window` counts the tokens a query sees, itself included; None is all. `query_heads` share
    the KV heads evenly; 0 where their number does not matter."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    query_heads: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A layer whose past is a state of fixed size: `shapes` of its arrays for one sequence, starting at zero, in float32."""

    shapes: tuple[tuple[int, ...], ...]


class OpaqueState(Protocol):
    """What a model that keeps its own state makes for one sequence."""

    def arrays(self) -> list[mx.array]:
        """Everything it holds, to be evaluated with the step."""
        ...


@dataclass(frozen=True, slots=True)
class OpaqueSpec:
    """A whole model that keeps its own state per sequence (mlx-lm's architectures, run one sequence at a time)."""

    make: Callable[[], OpaqueState]


RecurrentUpdate = Callable[[mx.array, tuple[mx.array, ...]], tuple[mx.array, tuple[mx.array, ...]]]
"""`(inputs [B, L, C], states [B, ...]) -> (outputs [B, L, D], states)`: B sequences advance by L tokens."""

LayerSpec = Union[AttentionSpec, RecurrentSpec, OpaqueSpec]


@dataclass(frozen=True, slots=True)
class Segment:
    """The part that one sequence has in a step: rows `start .. start + count` hold its tokens `past .. past + count`.

    `total` is the number of tokens of the sequence known when its current prompt was admitted, at least `past + count`: rope
    variants that depend on the sequence's length (dynamic, longrope) read it, so that chunking never changes a result.
    """

    slot: int
    start: int
    count: int
    past: int
    total: int

    @property
    def filled(self) -> int:
        """Pages that become full."""
        return (self.past + self.count) // PAGE - self.past // PAGE


class Rotation(Protocol):
    """Rotary position embedding of the rows of one step, made once and used by every layer: `[T, heads, dim]` to the same."""

    @property
    def frequencies(self) -> Sequence[Sequence[float]]:
        """Radians per position `[dims / 2]`, for each segment."""
        ...

    def __call__(self, x: mx.array) -> mx.array: ...


class HeadNorm(Protocol):
    """`x / rms(x) * weight` along the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What is done with each head of queries and of keys, in this order, before they meet."""

    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The constants of a layer's attention."""

    scale: float
    """Factor of the scores, before the softmax."""
    softcap: float | None = None
    """c: scores become `c * tanh(scores / c)`."""
    sinks: mx.array | None = None
    """`[Hq]`: a logit per head that takes part in the softmax and carries no value (gpt-oss)."""


class Step(Protocol):
    """The cache as one step of the model sees it. Valid for that step only."""

    segments: tuple[Segment, ...]

    @property
    def positions(self) -> mx.array:
        """int32 `[T]`: the position of each row in its own sequence."""
        ...

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        """Append k `[T, Hkv, Dk]` and v `[T, Hkv, Dv]`, and attend with q `[T, Hq, Dk]` causally, within the layer's window.
        Returns `[T, Hq, Dv]`."""
        ...

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        """The same for projections as they come: one to three arrays `[T, n]` that together have queries, keys and values behind one
        another, whose heads still have their `heads` steps before them. Returns `[T, Hq * Dv]`."""
        ...

    @property
    def runs_blocks(self) -> bool:
        """Whether `run_blocks` can be called."""
        ...

    def run_blocks(self, x: mx.array, blocks: Blocks, layers: Sequence[int], rotations: Sequence[Rotation | None]) -> mx.array:
        """Rows `[T, hidden]` through whole blocks of the CPU kernels, whose attention layers are `layers`."""
        ...

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Run a recurrent layer over `inputs` `[T, C]`: `update(x [B, L, C], states [B, ...]) -> (y [B, L, D], states)` is called
        for groups of segments of equal length; the results come back as `[T, D]`."""
        ...

    def opaque(self, segment: Segment) -> OpaqueState:
        """The state that `OpaqueSpec.make` gave this segment's sequence; the model changes it in place."""
        ...
