"""Interface between a model and its cache. The model never inspects the cache.

A step is one flat row of T tokens: the concatenated segments of all scheduled sequences, without padding. The cache assigns pages and
states to sequences, creates the masks, and lets a query attend only to its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Protocol, Union

import mlx.core as mx
import numpy as np

from ..kernels_cpu import Blocks
from ..util.dataclass import dataclass
from .pages import PAGE as PAGE


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Spec of a layer with keys and values."""

    kv_heads: int
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    window: int | None = None
    """Window: tokens that a query attends to, including its own; None for all."""
    query_heads: int = 0
    """Number of query heads, which share the KV heads evenly; 0 if irrelevant."""
    shared: bool = False
    """True if layers without a spec also read the pages, by `Step.attend_again`."""
    skips_first: bool = False
    """True if later tokens do not attend to a sequence's first one (draft heads, which need a token before it)."""
    sees_spans: bool = False
    """True if the rows of an image also attend to later rows of the same image (`Segment.spans`); the window limits only their past."""
    whole_spans: bool = False
    """True if the window does not hide rows of the same image either."""
    values_in_keys: bool = False
    """True if a value is the first `value_dim` channels of its key (latent attention). Pages then have keys only, except for the CPU
    kernels, whose values have another layout."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Spec of a layer with a state of fixed size."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of a sequence's state arrays: float32, initially zero."""
    optional: bool = False
    """True if a sequence may resume with zeros instead of its state, because only drafts depend on it."""


@dataclass(frozen=True, slots=True)
class BidirectionalSpec:
    """Spec of a bidirectional layer, which stores nothing and receives each text whole in one step."""

    kv_heads: int
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    window: int | None = None
    """Tokens at a distance below this are attended to, before and after; None for all."""
    query_heads: int = 0
    """Number of query heads, which share the KV heads evenly."""


class OpaqueState(Protocol):
    """State of one sequence in a model with its own cache."""

    def arrays(self) -> list[mx.array]:
        """Return all arrays of the state, to evaluate with the step."""
        ...


@dataclass(frozen=True, slots=True)
class OpaqueSpec:
    """Spec of a whole model with its own cache (mlx-lm's architectures), one sequence at a time."""

    make: Callable[[], OpaqueState]
    """Creates the empty state of a new sequence."""


RecurrentUpdate = Callable[[mx.array, tuple[mx.array, ...]], tuple[mx.array, tuple[mx.array, ...]]]
"""`(inputs [B, L, C], states [B, ...]) -> (outputs [B, L, D], states)`: B sequences advance by L tokens."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Spec of a layer on another machine, whose pages and states are only counted here."""

    spec: Union[AttentionSpec, RecurrentSpec]
    """Spec on that machine."""


LayerSpec = Union[AttentionSpec, BidirectionalSpec, RecurrentSpec, OpaqueSpec, Elsewhere]


def whole_spec(spec: LayerSpec) -> Union[AttentionSpec, BidirectionalSpec, RecurrentSpec, OpaqueSpec]:
    """Return the spec of a layer, wherever it is."""
    return spec.spec if isinstance(spec, Elsewhere) else spec


def sees_spans(layers: Sequence[LayerSpec]) -> bool:
    """Return True if rows of an image see one another in some layer, here or elsewhere, so that an image is never divided."""
    return any(isinstance(spec, AttentionSpec) and spec.sees_spans for spec in map(whole_spec, layers))


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a step: rows `start` to `start + count` are its tokens `past` to `past + count`."""

    slot: int
    """Slot of the sequence in the cache."""
    start: int
    """First row in the step."""
    count: int
    """Tokens computed in this step."""
    past: int
    """Tokens computed before this step."""
    total: int
    """Tokens known at admission of the prompt, at least `past + count`. Rope variants that depend on the length (dynamic, longrope) use it,
    so that chunking does not change results."""
    drafts: int = 0
    """Number of last tokens that are drafts and may be rolled back (`PagedCache.verified`)."""
    read: int = 0
    """Number of last rows that are sampled or returned; machines with the last layers need not send the others."""
    shift: int = 0
    """Rotary position minus index of each row, unless `rope` gives the positions: not 0 after images with M-RoPE."""
    rope: np.ndarray[Any, np.dtype[np.int32]] | None = field(default=None, compare=False)
    """Rotary positions of the rows, int32 `[3, count]` (time, row, column), in a segment with image rows; None elsewhere."""
    spans: tuple[tuple[int, int], ...] = ()
    """Index ranges [first, end) of images in this segment, each whole, whose rows see one another in layers with
    `AttentionSpec.sees_spans`."""

    @property
    def filled(self) -> int:
        """Number of pages that become full in this step."""
        return (self.past + self.count) // PAGE - self.past // PAGE


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of a step that enter the first block as they are, instead of the embedding of their token: image features."""

    rows: mx.array
    """Rows of the step, int32 `[n]`, ascending. Their tokens are ids that the embedding has, but mean nothing."""
    features: mx.array
    """`[n, hidden]`, without the model's embedding scale."""
    deepstack: tuple[mx.array, ...] = ()
    """Array k, `[n, hidden]`, is added to these rows after block k (Qwen3-VL)."""


class Rotation(Protocol):
    """Rotary position embedding of a step's rows, shared by all layers: maps `[T, heads, dim]` to the same shape."""

    @property
    def parts(self) -> Sequence[tuple[Sequence[float], int, int]]:
        """Rows in order, in parts with consecutive positions: radians per position `[dims / 2]`, first position, number of rows."""
        ...

    @property
    def waves(self) -> mx.array:
        """Cosines and sines of each row's angles, float32 `[T, 2, dims / 2]`."""
        ...

    def __call__(self, x: mx.array) -> mx.array: ...


class HeadNorm(Protocol):
    """RMS norm `x / rms(x) * weight` along the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class ValueSteps:
    """Origin of values and the operation on their heads, in layers where they are not simply a projection (Gemma 4)."""

    eps: float
    """Epsilon of their norm `x / rms(x)`, which has no weight."""
    from_keys: bool = False
    """True if rows have no values: keys, before their norm and rotation, serve as values too."""


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """Operations on the heads of projections before attention: a sum with their bias, norms, rotation."""

    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    rotation: Rotation | None = None
    """Rotary embedding of queries and keys."""
    bias: mx.array | None = None
    """Bias of queries, keys and values, `[n]`, unless the rows include it already."""
    values: ValueSteps | None = None
    """Operation on value heads; None without one."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Constants of a layer's attention."""

    scale: float
    """Factor applied to the scores before the softmax."""
    softcap: float | None = None
    """Cap c: scores become `c * tanh(scores / c)`."""
    sinks: mx.array | None = None
    """Sinks `[Hq]`: a logit per head that takes part in the softmax without a value (gpt-oss)."""


class Step(Protocol):
    """View of the cache for one step of the model."""

    segments: tuple[Segment, ...]
    given: GivenRows | None
    """Rows of images in this step; None without any."""

    @property
    def positions(self) -> mx.array:
        """Position of each row in its sequence, int32 `[T]`."""
        ...

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        """Append keys k `[T, Hkv, Dk]` and values v `[T, Hkv, Dv]`, then attend causally with queries q `[T, Hq, Dk]` in the window.

        Returns `[T, Hq, Dv]`.
        """
        ...

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        """Attend with raw projections: one to three arrays `[T, n]` with queries, keys and values, before their `heads` steps. There are no
        values with `ValueSteps.from_keys`.

        Returns `[T, Hq * Dv]`.
        """
        ...

    def attend_again(self, layer: int, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """Attend with raw queries `[T, Hq * Dk]`, before their `heads` steps, to the pages of a `shared` layer after its `attend` in this
        step, without appending.

        In a read-only step (`PagedCache.reading`), attend to any layer's tokens before each segment. Returns `[T, Hq * Dv]`.
        """
        ...

    @property
    def runs_blocks(self) -> bool:
        """True if `run_blocks` can be called."""
        ...

    def run_blocks(
        self,
        x: mx.array,
        blocks: Blocks,
        layers: Sequence[int],
        rotations: Sequence[Rotation | None],
        recurrent: Sequence[int] = (),
        given: mx.array | None = None,
    ) -> mx.array:
        """Run x `[T, hidden]` through whole blocks of the CPU kernels. Returns `[T, hidden]`.

        `layers` are the blocks' attention layers; the pages of a repeated layer are only read. `recurrent` are the layers with states, and
        `given` `[T, n]` the per-layer inputs.
        """
        ...

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Run a recurrent layer over `inputs` `[T, C]`. Returns `[T, D]`.

        `update(x [B, L, C], states [B, ...]) -> (y [B, L, D], states)` is called once per group of segments of equal length.
        """
        ...

    def opaque(self, segment: Segment) -> OpaqueState:
        """Return the state of the segment's sequence, created by `OpaqueSpec.make`; the model modifies it in place."""
        ...
