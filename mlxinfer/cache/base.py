"""The contract between a model and its cache. The model asks; it never inspects.

A step is one flat row of T tokens: the segments of all sequences that take part, one after another, without padding.
The cache knows which page or state belongs to which sequence, makes the masks, and ensures that a query reaches only its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Union

import mlx.core as mx

from ..kernels_cpu import Blocks
from ..util.dataclass import dataclass
from .pages import PAGE as PAGE


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer whose past is keys and values."""

    kv_heads: int
    """Number of KV heads."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    window: int | None = None
    """Tokens that a query attends to, its own included; None: all."""
    query_heads: int = 0
    """Number of query heads, which share the KV heads evenly; 0 where it does not matter."""
    shared: bool = False
    """Whether other layers read its pages as well, by `Step.attend_again`: these have no spec of their own."""
    skips_first: bool = False
    """Whether later tokens do not see a sequence's first one (heads that draft: nothing comes before it that they could join it with)."""
    values_in_keys: bool = False
    """Whether a value is the first `value_dim` channels of its key (latent attention): pages then hold keys alone, unless the CPU kernels
    read them, which have values in another layout."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A layer whose past is a state of fixed size."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the state's arrays for one sequence: float32, initially zero."""
    optional: bool = False
    """Whether a sequence may resume with zeros where its state was not kept: nothing but drafts depends on it."""


@dataclass(frozen=True, slots=True)
class BidirectionalSpec:
    """A layer whose tokens attend to what follows them as well: it keeps nothing, and sees each text whole, in one step."""

    kv_heads: int
    """Number of KV heads."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    window: int | None = None
    """Tokens at a distance below this are seen, before and after; None: all."""
    query_heads: int = 0
    """Number of query heads, which share the KV heads evenly."""


class OpaqueState(Protocol):
    """The state of one sequence in a model that manages its own cache."""

    def arrays(self) -> list[mx.array]:
        """All arrays of the state, to be evaluated with the step."""
        ...


@dataclass(frozen=True, slots=True)
class OpaqueSpec:
    """A whole model that manages its own cache (mlx-lm's architectures), one sequence at a time."""

    make: Callable[[], OpaqueState]
    """Makes the empty state of a new sequence."""


RecurrentUpdate = Callable[[mx.array, tuple[mx.array, ...]], tuple[mx.array, tuple[mx.array, ...]]]
"""`(inputs [B, L, C], states [B, ...]) -> (outputs [B, L, D], states)`: B sequences advance by L tokens."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A layer that another machine computes, and whose pages and states it keeps: here they are only counted."""

    spec: Union[AttentionSpec, RecurrentSpec]
    """What it stores there."""


LayerSpec = Union[AttentionSpec, BidirectionalSpec, RecurrentSpec, OpaqueSpec, Elsewhere]


def whole_spec(spec: LayerSpec) -> Union[AttentionSpec, BidirectionalSpec, RecurrentSpec, OpaqueSpec]:
    """What a layer stores, wherever it is."""
    return spec.spec if isinstance(spec, Elsewhere) else spec


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a step: rows `start` to `start + count` hold its tokens `past` to `past + count`."""

    slot: int
    """The sequence's slot in the cache."""
    start: int
    """Its first row in the step."""
    count: int
    """Tokens computed in this step."""
    past: int
    """Tokens computed before this step."""
    total: int
    """Tokens known when the current prompt was admitted, at least `past + count`. Rope variants that depend on the length (dynamic,
    longrope) read it, so that chunking never changes a result."""
    drafts: int = 0
    """How many of the last tokens are drafts, which may have to be taken back (`PagedCache.verified`)."""
    read: int = 0
    """How many of the last rows are read once the step is computed, to sample from them or to return them: others need not come back from
    machines that compute the last layers."""

    @property
    def filled(self) -> int:
        """Pages that become full in this step."""
        return (self.past + self.count) // PAGE - self.past // PAGE


class Rotation(Protocol):
    """Rotary position embedding for the rows of one step, made once and used by every layer: `[T, heads, dim]` to the same shape."""

    @property
    def frequencies(self) -> Sequence[Sequence[float]]:
        """Radians per position, `[dims / 2]` for each segment."""
        ...

    @property
    def waves(self) -> mx.array:
        """float32 `[T, 2, dims / 2]`: cosines and sines of each row's angles."""
        ...

    def __call__(self, x: mx.array) -> mx.array: ...


class HeadNorm(Protocol):
    """`x / rms(x) * weight` along the last axis."""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What is applied to each query and key head, in this order, before attention."""

    q_norm: HeadNorm | None = None
    """Norm of the query heads."""
    k_norm: HeadNorm | None = None
    """Norm of the key heads."""
    rotation: Rotation | None = None
    """Rotary embedding of both."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The constants of a layer's attention."""

    scale: float
    """Factor applied to the scores before the softmax."""
    softcap: float | None = None
    """Cap c: scores become `c * tanh(scores / c)`."""
    sinks: mx.array | None = None
    """`[Hq]`: one logit per head that takes part in the softmax but has no value (gpt-oss)."""


class Step(Protocol):
    """The cache as one step of the model sees it. Valid for that step only."""

    segments: tuple[Segment, ...]

    @property
    def positions(self) -> mx.array:
        """int32 `[T]`: the position of each row in its own sequence."""
        ...

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, params: AttentionParams) -> mx.array:
        """Append keys k `[T, Hkv, Dk]` and values v `[T, Hkv, Dv]`, then attend causally with queries q `[T, Hq, Dk]` within the layer's
        window. Returns `[T, Hq, Dv]`."""
        ...

    def attend_rows(self, layer: int, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> mx.array:
        """`attend` for raw projections: one to three arrays `[T, n]` that hold queries, keys and values in this order and still need their
        `heads` steps. Returns `[T, Hq * Dv]`."""
        ...

    def attend_again(self, layer: int, q: mx.array, params: AttentionParams) -> mx.array:
        """Attend with further queries q `[T, Hq, Dk]` to what a layer whose spec is `shared` holds, after its own `attend` in this step. In
        a step that only reads (`PagedCache.reading`), to what any layer holds of the tokens before each segment. Appends nothing.
        Returns `[T, Hq, Dv]`."""
        ...

    @property
    def runs_blocks(self) -> bool:
        """Whether `run_blocks` can be called."""
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
        """Run x `[T, hidden]` through whole blocks of the CPU kernels; `layers` are their attention layers, where one comes again its
        pages are read only; `recurrent` those with states; `given` `[T, n]` the blocks' own inputs. Returns `[T, hidden]`."""
        ...

    def recur(self, layer: int, inputs: mx.array, update: RecurrentUpdate) -> mx.array:
        """Run a recurrent layer over `inputs` `[T, C]`: `update(x [B, L, C], states [B, ...]) -> (y [B, L, D], states)` is called once per
        group of segments of equal length. Returns `[T, D]`."""
        ...

    def opaque(self, segment: Segment) -> OpaqueState:
        """The state of this segment's sequence, made by `OpaqueSpec.make`; the model changes it in place."""
        ...
