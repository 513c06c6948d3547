"""Decoder blocks for the CPU kernels: a list of instructions on buffers, which a step runs as one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, overload

import mlx.core as mx
import numpy as np

from ..util.dataclass import dataclass
from .native import INSTRUCTIONS_VERSION, Blocks, in_use, native
from .packed import GATES, PRECISIONS, Packed

if TYPE_CHECKING:
    from . import _native

Norm = tuple[mx.array, float]
"""Weight `[n]` and epsilon of a root-mean-square norm."""

SCORES = {"none": 0, "softmax": 1, "sigmoid": 2}
"""Functions that a router applies to its logits before it chooses."""
UNITS = {"sigmoid": 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3, "relu_squared": 4}
"""Functions of a gate, multiplied with x; `relu_squared` does not read x."""

_SAME, _FLOAT32, _INT32 = range(3)


@dataclass(frozen=True, slots=True)
class ProgramProjection:
    """A packed matrix with an optional bias."""

    matrix: Packed
    """`[out, in]`, or one per expert `[experts, out, in]`."""
    bias: mx.array | None = None
    """`[out]`, or `[experts, out]`."""
    in_pool: bool = False
    """True if matrix and bias are slots of a pool, whose contents change."""


@dataclass(frozen=True, slots=True)
class View:
    """Neighbouring columns of a buffer."""

    buffer: int
    """Number of the buffer; 0 is the residual stream."""
    width: int
    """Columns of the buffer."""
    first: int
    """The first column of the view."""
    count: int
    """Columns of the view."""
    each: int = 1
    """Rows of the buffer for each row of the step."""
    kind: int = _SAME
    """0: the stream's dtype, 1: float32, 2: int32."""

    def columns(self, first: int, count: int) -> View:
        """A part of these columns."""
        return View(self.buffer, self.width, self.first + first, count, self.each, self.kind)

    @property
    def native(self) -> _native.View:
        return native.View(self.buffer, self.width, self.first, self.count, self.each, self.kind)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts of each row, and their weights."""

    experts: View
    """int32, `each` rows of one column."""
    shares: View
    """float32, like `experts`."""


@dataclass(frozen=True, slots=True)
class Router:
    """Rule that chooses experts from logits. Fields as in `kernels_metal.router.reference.Rule`."""

    chosen: int
    """Experts for each row."""
    scores: str
    """One of `SCORES`; with "none" the shares are a softmax over the chosen logits."""
    bias: mx.array | None = None
    """float32 `[experts]`, added to the scores for the choice only."""
    normalized: bool = False
    """True if shares are divided by their sum."""
    least: float = 0.0
    """Lower bound of the sum."""
    added: float = 0.0
    """Added to the sum."""
    scale: float = 1.0
    """Factor of the shares."""
    groups: int = 1
    """Groups of neighbouring experts."""
    kept: int = 1
    """Groups from which experts are chosen."""
    ranked: int = 1
    """Number of a group's best scores whose sum ranks it."""
    gains: mx.array | None = None
    """float32 `[experts]`, factors of the shares."""


NextWave = Callable[[np.ndarray, np.ndarray, int, np.ndarray], bool]
"""Brings chosen experts into the slots of a pool: `next(chosen, expected, wave, slots)`, all int32 `[n]` in the kernels' memory.

Wave number `wave` of the `chosen` experts is loaded. `slots` receives their slots, and -1 for experts of other waves. Returns True if
another wave follows. `expected` are experts that the next layer is expected to choose. MLX's thread calls it, and it must not raise."""


def can_run_waves() -> bool:
    """True if a `Program` can read experts from a pool; an older module cannot."""
    return can_run_blocks() and hasattr(native, "ExpertWaves")


def can_run_blocks() -> bool:
    """True if a `Program` can be created; an older module has other instructions."""
    return in_use() and getattr(native, "instructions_version", 0) == INSTRUCTIONS_VERSION


class Program:
    """Collects instructions. An instruction with a result takes the name of its buffer. Instructions of one name share a buffer, which is
    as large as the largest result."""

    def __init__(self, hidden: int, dtype: mx.Dtype) -> None:
        """Rows `[T, hidden]` of `dtype`."""
        self.hidden = hidden
        self.dtype = dtype
        self.stream = View(0, hidden, 0, hidden)
        self.instructions: list[object] = []
        self._buffers = {"": 0, "given": 1}
        self._given = 0

    def view(self, name: str, width: int, each: int = 1, kind: int = _SAME) -> View:
        """All columns of the buffer with this name."""
        return View(self._buffers.setdefault(name, len(self._buffers)), width, 0, width, each, kind)

    def given(self, width: int) -> View:
        """The `width` read-only columns that a step passes in addition to its rows."""
        self._given = width
        return View(1, width, 0, width)

    def finish(self, first: int = 0) -> Blocks:
        """The blocks, from instruction `first` on. Raises ValueError if sizes do not fit."""
        return native.blocks(self.instructions[first:], self.hidden, self._given, self.dtype)

    def multiply(
        self,
        x: View,
        projection: ProgramProjection,
        name: str = "",
        *,
        to: View | None = None,
        norm: Norm | None = None,
        onto: View | None = None,
        gate: str | None = None,
        experts: View | None = None,
    ) -> View:
        """`norm(x) @ matrix.T + bias + onto`, or its `gate`; see `Packed.multiply`. The result is written to `to`, or to the buffer `name`.
        Without `experts`, matrices per expert apply one by one to the `each` rows of x."""
        m = projection.matrix
        width = m.layout.n // (2 if gate else 1)
        y = to or self.view(name, width, x.each if experts is None else experts.each)
        n = native
        # A copy of a pool's bias would not change with the pool.
        bias = projection.bias if projection.in_pool else self.vector(projection.bias)
        made = n.Projection(m.data, m.layout, PRECISIONS[m.precision], bias)
        self._add(n.Multiply(x.native, y.native, made, self._norm(norm), _maybe(onto), _maybe(experts), 0 if gate is None else GATES[gate]))
        return y

    def norm(
        self, x: View, norm: Norm, name: str = "", *, to: View | None = None, onto: View | None = None, centring: bool = False
    ) -> View:
        """`norm(x) + onto`, where `centring` subtracts the mean first."""
        y = to or self.view(name, x.count, x.each)
        self._add(native.NormView(x.native, y.native, self._norm(norm, centring), _maybe(onto)))
        return y

    def attend(
        self,
        queries: View,
        keys: View | None,
        values: View | None,
        width: int,
        *,
        step: int,
        still: int = 0,
        turned: View | None = None,
        turned_step: int = 0,
        source: int = -1,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
        value_norm: Norm | None = None,
        query_gain: mx.array | None = None,
        sinks: mx.array | None = None,
        scale: float,
        softcap: float | None = None,
    ) -> View:
        """Attention of the next attention layer, `width` columns. Query heads are `step` columns apart.

        If `still` is positive, only the first `still` channels of a head are normed, and only its other channels are rotated. Queries may
        have these other channels in `turned`, `turned_step` columns apart. `query_gain` `[dim]` multiplies queries after rotation. Without
        keys and values, the instruction reads the pages that attention number `source` fills, in the order of these calls.
        """
        y, n = self.view("answers", width), native
        views = queries.native, _maybe(turned), _maybe(keys), _maybe(values), y.native
        norms = self._norm(query_norm), self._norm(key_norm), self._norm(value_norm)
        vectors = self.vector(query_gain, mx.float32), self.vector(sinks, mx.float32)
        self._add(n.Attend(*views, (step, turned_step, still, source), *norms, *vectors, scale, softcap or 0.0))
        return y

    def choose(self, logits: View, router: Router) -> ExpertChoice:
        """Choose the experts of each row."""
        experts, shares = self.view("experts", 1, router.chosen, _INT32), self.view("shares", 1, router.chosen, _FLOAT32)
        vectors = self.vector(router.bias, mx.float32), self.vector(router.gains, mx.float32)
        numbers, groups = (router.least, router.added, router.scale), (router.groups, router.kept, router.ranked)
        views = logits.native, experts.native, shares.native
        self._add(native.ChooseExperts(*views, *vectors, SCORES[router.scores], router.normalized, numbers, groups))
        return ExpertChoice(experts, shares)

    def add(
        self, x: View, to: View, *, onto: View | None = None, shares: View | None = None, gate: View | None = None, factor: float = 1.0
    ) -> None:
        """`onto + factor * sum(shares * x)` over the `each` rows of x; or `sigmoid(gate) * x`, with a gate of one column."""
        self._add(native.AddRows(x.native, to.native, _maybe(shares), _maybe(gate), _maybe(onto), factor))

    @contextmanager
    def waves(self, chosen: View, next_wave: NextWave, expected: View | None = None) -> Iterator[View]:
        """Repeat the instructions of the `with` block for each wave of experts. Only products and gates with `experts` may be added there.

        Yields a view like `chosen` with the slots of the present wave. Products and gates compute nothing where these are negative.
        """
        slots, start = self.view("slots", 1, chosen.each, _INT32), len(self.instructions)
        yield slots
        count = len(self.instructions) - start
        self.instructions.insert(start, native.ExpertWaves(chosen.native, slots.native, _maybe(expected), count, next_wave))

    def gate(
        self,
        x: View,
        gate: View,
        unit: str,
        to: View,
        *,
        parts: int = 1,
        step: int = 0,
        alpha: float = 1.0,
        limit: float = 0.0,
        experts: View | None = None,
    ) -> None:
        """`unit(alpha * gate) * x`, in `parts` equal parts of a row; the parts of the gate are `step` columns apart. Rows with a negative
        number in `experts` are left out."""
        views = x.native, gate.native, to.native
        if experts is None:
            self._add(native.GateView(*views, UNITS[unit], alpha, limit, parts, step))
        else:
            self._add(native.GateView(*views, UNITS[unit], alpha, limit, parts, step, experts.native))

    def delta(
        self, inputs: Sequence[View], sizes: tuple[int, int, int, int], convolution: mx.array, decay: mx.array, decay_bias: mx.array
    ) -> View:
        """Recurrence of a gated delta net, float32.

        `inputs` are queries, keys and values in one view, beta, and decay. `sizes` are key heads, value heads, and the channels of each.
        `convolution` is `[channels, taps, 1]`. `decay` and `decay_bias` have a number for each value head, or for each channel of its keys.
        """
        y, taps = self.view("states", sizes[1] * sizes[3], kind=_FLOAT32), convolution.shape[1]
        vectors = self.vector(decay, mx.float32), self.vector(decay_bias, mx.float32)
        rows, beta, decays = [view.native for view in inputs]
        self._add(native.Delta(rows, beta, decays, y.native, (*sizes, taps), _by_tap(convolution), *vectors))
        return y

    def mamba(
        self,
        inputs: Sequence[View],
        sizes: tuple[int, int, int, int],
        convolution: mx.array,
        bias: mx.array | None,
        vectors: Sequence[mx.array],
        limits: tuple[float, float],
    ) -> View:
        """Recurrence of Mamba 2, float32.

        `inputs` are the convolution's input, and steps. `sizes` are heads, channels of a head, numbers of a state, and groups. `vectors`
        `[heads]` are decays, factors of the input, and biases of steps, which are clamped to `limits`.
        """
        y, taps = self.view("states", sizes[0] * sizes[1], kind=_FLOAT32), convolution.shape[1]
        decay, skip, step_bias = [self.vector(a, mx.float32) for a in vectors]
        mixed, steps = [view.native for view in inputs]
        bias = self.vector(bias, mx.float32)
        self._add(native.Mamba(mixed, steps, y.native, (*sizes, taps), _by_tap(convolution), bias, decay, skip, step_bias, limits))
        return y

    def short_convolution(self, before: View, after: View, x: View, convolution: mx.array, bias: mx.array | None) -> View:
        """`after * conv(before * x)`."""
        y, taps = self.view("answers", x.count), convolution.shape[1]
        views = before.native, after.native, x.native, y.native
        self._add(native.ShortConvolution(*views, taps, _by_tap(convolution), self.vector(bias, mx.float32)))
        return y

    def gated_norm(
        self,
        x: View,
        gate: View,
        weight: mx.array | None,
        eps: float,
        *,
        normed: bool = True,
        first: bool = False,
        unit: str = "silu",
        groups: int = 1,
    ) -> View:
        """`norm(x * unit(gate))`, or `norm(x) * unit(gate)` if `first`, of float32 rows.

        Each of `groups` parts is normed separately. `weight` is for a part or for all. `unit` is silu or sigmoid.
        """
        y = self.view("answers", x.count)
        self._add(
            native.GatedNorm(x.native, gate.native, y.native, self.vector(weight, mx.float32), eps, normed, first, unit == "silu", groups)
        )
        return y

    @overload
    def vector(self, a: mx.array, dtype: mx.Dtype | None = None) -> mx.array: ...

    @overload
    def vector(self, a: mx.array | None, dtype: mx.Dtype | None = None) -> mx.array | None: ...

    def vector(self, a: mx.array | None, dtype: mx.Dtype | None = None) -> mx.array | None:
        """Evaluate `a` as a contiguous array, because the operation reads its memory directly."""
        if a is None:
            return None
        a = mx.contiguous(a.astype(dtype or self.dtype))
        mx.eval(a)
        return a

    @overload
    def _norm(self, pair: Norm, centring: bool = False) -> _native.Norm: ...

    @overload
    def _norm(self, pair: Norm | None, centring: bool = False) -> _native.Norm | None: ...

    def _norm(self, pair: Norm | None, centring: bool = False) -> _native.Norm | None:
        return None if pair is None else native.Norm(self.vector(pair[0]), pair[1], centring)

    def _add(self, instruction: object) -> None:
        self.instructions.append(instruction)


def _maybe(view: View | None) -> _native.View | None:
    return None if view is None else view.native


def _by_tap(convolution: mx.array) -> mx.array:
    """`[channels, taps, 1]` to float32 `[taps, channels]`."""
    a = mx.contiguous(convolution[..., 0].astype(mx.float32).T)
    mx.eval(a)
    return a
