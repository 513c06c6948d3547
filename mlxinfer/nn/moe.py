"""Mixtures of experts: a router sends each token through a few experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..kernels_cpu import Packed
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .activations import Gate, fused
from .few_row_experts import TRIAL, Parts, WeightedExperts, computation, subject_of, try_experts
from .linear import JoinedLinear, Linear, NamedProjection
from .mixed_scales import is_mixed, narrowed, restored
from .norms import RMSNorm
from .routes import Route
from .weights import Dense, Quantized, Recipe, Weights

if TYPE_CHECKING:
    from ..expert_offload import ExpertPool, ExpertStore
    from ..kernels_metal.experts.trial import Subject

SORT_FROM = 64
"""Minimum rows for sorting them by expert, so that each matrix is read once."""
_TOGETHER = 4
"""Minimum rows per expert for which MLX's sorted products read a matrix once for several of them."""
EXPECTED = 3, 8
"""Share of a row's experts that are read ahead."""
_KNOWN_WAYS = 64
"""Shapes of rows for which experts cache how they are computed."""


class ExpertLinear(Linear):
    """A matrix `[experts, out, in]` with optional biases `[experts, out]`. `experts` `[...]` selects the matrix for each row of `x`
    `[..., 1, in]`."""

    in_pool = False
    """True if matrix and biases are slots of a pool."""

    @classmethod
    def load_experts(
        cls,
        weights: Weights,
        name: str,
        shape: tuple[int, int, int],
        *,
        bias: Sequence[Recipe] | None = None,
        otherwise: Sequence[Recipe] = (),
    ) -> ExpertLinear:
        """Load `name.weight`, and `name.bias` unless `bias` is None. `otherwise` and `bias` are recipes for them."""
        matrix = weights.matrix(f"{name}.weight", shape, otherwise=otherwise)
        own = None if bias is None else weights.vector(f"{name}.bias", shape[:2], otherwise=bias)
        return cls(matrix, own, (NamedProjection(name, shape[1]),))

    def __call__(  # type: ignore[override]
        self, x: mx.array, experts: mx.array | None = None, is_sorted: bool = False
    ) -> mx.array:
        matrix = self.matrix
        if isinstance(matrix, Packed):
            return matrix.multiply(x, bias=self.bias, experts=experts)[..., None, :]
        if not isinstance(matrix, Quantized):
            weights = matrix.weight if isinstance(matrix, Dense) else matrix.dequantize(x.dtype)
            y = _gather_product(x, weights.swapaxes(-1, -2), experts, is_sorted)
        elif is_mixed(x, matrix):
            y = restored(_gather_packed(narrowed(x), matrix, experts, is_sorted))
        else:
            y = _gather_packed(x, matrix, experts, is_sorted)
        return y if self.bias is None else y + self.bias[experts][..., None, :]

    def gated(  # type: ignore[override]
        self, activation: str, x: mx.array, experts: mx.array | None = None, is_sorted: bool = False, *, norm: RMSNorm | None = None
    ) -> mx.array:
        assert norm is None
        assert isinstance(self.matrix, Packed)
        return self.matrix.multiply(x, bias=self.bias, gate=activation, experts=experts)[..., None, :]


def _gather_packed(x: mx.array, matrix: Quantized, experts: mx.array | None, is_sorted: bool) -> mx.array:
    f = matrix.format
    return mx.gather_qmm(
        x,
        matrix.weight,
        matrix.scales,
        matrix.biases,
        rhs_indices=experts,
        transpose=True,
        group_size=f.group_size,
        bits=f.bits,
        mode=f.mode,
        sorted_indices=is_sorted,
    )


def _gather_product(x: mx.array, weights: mx.array, experts: mx.array | None, is_sorted: bool) -> mx.array:
    if not is_gpu() and x.dtype != mx.float32:
        # MLX's CPU kernel supports only float32.
        return _gather_product(x.astype(mx.float32), weights.astype(mx.float32), experts, is_sorted).astype(x.dtype)
    return mx.gather_mm(x, weights, rhs_indices=experts, sorted_indices=is_sorted)


@dataclass(frozen=True, slots=True)
class FollowingLayer:
    """The next layer with experts, whose choice is predicted: its router reads the rows before this layer's experts.

    The first experts of a prediction are worth a read, the last ones are not: `python -m benchmarks expert-predictions smollm2` prints how
    many are right by rank. On its rows 78 % of 8 of 128 were, and 93 % of the first three.
    """

    gains: mx.array
    """Weight of the layer's norm divided by that of the norm before this layer, `[hidden]`."""
    router: Linear
    route: Route
    """Chooses the experts that are worth a read."""
    pool: ExpertPool

    @classmethod
    def of(cls, before: RMSNorm, norm: RMSNorm, router: Linear, route: Route, pool: ExpertPool) -> FollowingLayer:
        """Describe the layer with these parts. `before` is the norm of the layer before."""
        rule = route.rule
        few = replace(rule, chosen=max(rule.chosen * EXPECTED[0] // EXPECTED[1], 1))
        gains = mx.where(before.weight == 0, 0, norm.weight / before.weight).astype(norm.weight.dtype)
        mx.eval(gains)
        return cls(gains, router, Route(few, route.bias), pool)

    def expected(self, x: mx.array) -> mx.array:
        """Predict experts from the normed rows of the layer before, `[T, hidden]`: `[T, n]`."""
        return self.route(self.router(x * self.gains))[0]


class ExpertSlots:
    """Place of a layer's experts. `nn.packing.objects` does not enter it, since it has no attributes of its own in a dict."""

    __slots__ = ("experts", "following", "pool", "store")

    def __init__(self) -> None:
        self.following: FollowingLayer | None = None
        """The next layer, if its pool reads experts ahead."""
        self.experts = 0
        """Number of experts if the matrices are the slots of a pool; else 0."""
        self.pool: ExpertPool | None = None
        """Pool of the matrices, unless it has a slot for each expert."""
        self.store: ExpertStore | None = None
        """Store of `pool`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The gated feed-forward layers of all experts."""

    gate_up: JoinedLinear
    """`[experts, inner, hidden]` for the gate and for the up projection."""
    down: ExpertLinear
    """`[experts, hidden, inner]`."""
    gate: Gate
    ways: dict[tuple[object, ...], WeightedExperts] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Computations of `weighted` by shapes and dtypes."""
    slots: ExpertSlots = field(default_factory=ExpertSlots, init=False, repr=False, compare=False)

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Compute x `[T, hidden]` with the chosen experts `[T, k]`: `[T, k, hidden]`."""
        return _through_experts(self, x, experts)

    def inner(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Compute the rows between both products, of x `[..., 1, hidden]` with one expert for each: `[..., 1, inner]`."""
        return self.gate_up.gated(self.gate, x, experts, is_sorted)

    def weighted(self, x: mx.array, experts: mx.array, shares: mx.array, added: mx.array | None = None) -> mx.array:
        """Add up the results of `self(x, experts)` times `shares` float32 `[T, k]`, and `added` `[T, hidden]`: `[T, hidden]`.

        The kernels of few rows compute in float32 and round once; plain MLX rounds every result to the dtype of x.
        """
        return _weighted(self, x, experts, shares, added)

    def parts(self) -> Parts | None:
        """Return the products for the kernels; None if gates and ups are stored in different formats."""
        linears = self.gate_up.linears
        return Parts(linears[0], self.down, self.gate) if len(linears) == 1 else None


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """The feed-forward layers of all experts, without a gate."""

    up: ExpertLinear
    """`[experts, inner, hidden]`."""
    down: ExpertLinear
    """`[experts, hidden, inner]`."""
    activation: Callable[[mx.array], mx.array]
    """Applied between `up` and `down`."""
    ways: dict[tuple[object, ...], WeightedExperts] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Computations of `weighted` by shapes and dtypes."""
    slots: ExpertSlots = field(default_factory=ExpertSlots, init=False, repr=False, compare=False)

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Compute x `[T, hidden]` with the chosen experts `[T, k]`: `[T, k, hidden]`."""
        return _through_experts(self, x, experts)

    def inner(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Compute the rows between both products; see `Experts.inner`."""
        return self.activation(self.up(x, experts, is_sorted))

    def weighted(self, x: mx.array, experts: mx.array, shares: mx.array, added: mx.array | None = None) -> mx.array:
        """Add up the results of `self(x, experts)` times `shares` float32 `[T, k]`, and `added` `[T, hidden]`: `[T, hidden]`.

        See `Experts.weighted` for rounding.
        """
        return _weighted(self, x, experts, shares, added)

    def parts(self) -> Parts:
        """Return the products for the kernels."""
        return Parts(self.up, self.down, self.activation)


def _through_experts(layer: Experts | PlainExperts, x: mx.array, experts: mx.array) -> mx.array:
    if layer.slots.pool is None:
        return _products(layer, x, experts, sorts=experts.size >= SORT_FROM)
    waves = layer.slots.pool.waves(_read_back(layer, x, experts))
    return _in_waves(layer, waves, next(waves), x, experts.dtype)


def _in_waves(layer: Experts | PlainExperts, waves: Iterator[np.ndarray], first: np.ndarray, x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Compute like `_products` with the slots of `waves`, of which `first` was taken. Rows are sorted if all would be at once."""
    from ..expert_offload.waves import rows_in_waves  # few models need it

    sorts = first.size >= SORT_FROM
    if (first >= 0).all():
        return _products(layer, x, mx.array(first).astype(dtype), sorts=sorts)
    return rows_in_waves(waves, first, x, lambda rows, slots: _products(layer, rows, slots, sorts=sorts), dtype)


def _products(layer: Experts | PlainExperts, x: mx.array, experts: mx.array, *, sorts: bool) -> mx.array:
    """Compute x `[T, hidden]` with matrices `[T, k]`: `[T, k, hidden]`. `sorts`: rows of one matrix become neighbours."""
    down, inner = layer.down, layer.inner
    chosen, rows, back = experts, x[:, None, None], None
    if sorts and not isinstance(down.matrix, Packed):
        order = mx.argsort(experts.flatten())
        back = mx.argsort(order)
        chosen = experts.flatten()[order]
        # A new axis of one would have a stride of one number, which MLX's CUDA product takes for that of rows.
        rows = x[order // experts.shape[-1]].reshape(-1, 1, x.shape[-1])
    y = down(inner(rows, chosen, back is not None), chosen, back is not None).squeeze(-2)
    return y if back is None else y[back].reshape(*experts.shape, -1)


def _weighted(layer: Experts | PlainExperts, x: mx.array, experts: mx.array, shares: mx.array, added: mx.array | None) -> mx.array:
    if layer.slots.pool is not None:
        return _weighted_in_waves(layer, layer.slots.pool, x, experts, shares, added)
    return _way(layer, x, experts, added)(x, experts, shares, added)


def _weighted_in_waves(
    layer: Experts | PlainExperts, pool: ExpertPool, x: mx.array, experts: mx.array, shares: mx.array, added: mx.array | None
) -> mx.array:
    from ..expert_offload.waves import row_groups  # few models need it

    way, chosen = _way(layer, x, experts, added), _read_back(layer, x, experts)
    if isinstance(way, partial):
        waves = pool.waves(chosen)
        return _sum_of(_in_waves(layer, waves, next(waves), x, experts.dtype), x.dtype, shares, added)
    # A kernel computes whole rows. All rows of a group have their experts in slots at once.
    parts = []
    for group in row_groups(chosen, pool.slots):
        slots = mx.array(next(pool.waves(chosen[group], overlap=False))).astype(experts.dtype)
        more = None if added is None else added[group]
        parts.append(_way(layer, x[group], slots, more)(x[group], slots, shares[group], more))
        if group.stop < len(chosen):
            mx.eval(parts)  # the next group replaces the slots
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _read_back(layer: Experts | PlainExperts, x: mx.array, experts: mx.array) -> np.ndarray:
    """Compute the chosen experts `[T, k]`, and return them as int32. Expected experts of the next layer are read meanwhile."""
    from ..expert_offload.waves import EXPECTED_ROWS, by_rank  # few models need it

    following = layer.slots.following
    if following is None or len(x) > EXPECTED_ROWS:
        mx.eval(experts)
    else:
        expected = following.expected(x)
        mx.eval(experts, expected)
        following.pool.prefetch(by_rank(np.array(expected)))
    return np.array(experts).astype(np.int32)


def _way(layer: Experts | PlainExperts, x: mx.array, experts: mx.array, added: mx.array | None) -> WeightedExperts:
    """Return the computation for arrays like these."""
    known, key = layer.ways, (x.shape, x.dtype, experts.shape, None if added is None else added.dtype, TRIAL.age)
    way = known.get(key)
    if way is None:
        if len(known) >= _KNOWN_WAYS:
            known.clear()
        few = experts.size < max(SORT_FROM, _TOGETHER * (layer.slots.experts or layer.down.matrix.shape[0]))
        parts = layer.parts() if few else None
        way = known[key] = (parts and computation(parts, x, experts, added)) or partial(_plainly_weighted, layer)
    return way


def _plainly_weighted(layer: Experts | PlainExperts, x: mx.array, experts: mx.array, shares: mx.array, added: mx.array | None) -> mx.array:
    return _sum_of(_products(layer, x, experts, sorts=experts.size >= SORT_FROM), x.dtype, shares, added)


def _sum_of(y: mx.array, dtype: mx.Dtype, shares: mx.array, added: mx.array | None) -> mx.array:
    """Add up y `[T, k, hidden]` times `shares` `[T, k]`, and `added`."""
    y = (y * shares.astype(dtype)[..., None]).sum(axis=-2)
    return y if added is None else y + added


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A feed-forward layer for every token, optionally weighted by the sigmoid of a gate."""

    mlp: Callable[[mx.array], mx.array]
    """`[T, hidden]` to the same shape."""
    gate: Linear | None = None
    """`[1, hidden]`."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.mlp(x)
        if self.gate is None:
            return y
        gate = self.gate(x)
        # On a GPU one launch instead of two, which MLX fuses only for equal shapes.
        return _by_sigmoid(mx.broadcast_to(gate, y.shape), y) if is_gpu() else mx.sigmoid(gate) * y


_by_sigmoid = fused(lambda gate, y: mx.sigmoid(gate) * y)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Router, experts, and an optional shared expert: `[T, hidden]` to the same shape."""

    router: Linear
    """`[experts, hidden]`."""
    route: Route
    experts: Experts | PlainExperts
    shared: SharedExpert | None = None
    narrowing: Linear | None = None
    """Projects the input of experts that use fewer channels."""
    widening: Linear | None = None
    """Projects their output to all channels."""

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        x = x if norm is None else norm(x)
        experts, shares = self.route(self.router(x))
        read = x if self.narrowing is None else self.narrowing(x)
        every = None if self.shared is None else self.shared(x)
        if self.widening is None:
            y = self.experts.weighted(read, experts, shares, every)
        else:
            y = self.widening(self.experts.weighted(read, experts, shares))
            y = y if every is None else y + every
        return y if onto is None else onto + y


def try_mixture(layer: object, dtype: mx.Dtype) -> None:
    """Try the kernels for the experts of a layer with `experts` and a `route`, whose activations have this dtype; others are left alone."""
    if found := _mixture(layer):
        parts, count, added = found
        try_experts(parts, dtype, count, added=added)


def mixture_subject(layer: object, dtype: mx.Dtype) -> Subject | None:
    """Return the subject of the trial that `try_mixture` requests; None if there is none."""
    if (found := _mixture(layer)) is None:
        return None
    parts, count, added = found
    return subject_of(parts, dtype, count, added=added)


def _mixture(layer: object) -> tuple[Parts, int, bool] | None:
    """Return the products of a layer's experts, the experts of a row, and True if the result of a shared expert is added to theirs."""
    experts, route = getattr(layer, "experts", None), getattr(layer, "route", None)
    if not isinstance(experts, (Experts, PlainExperts)) or not isinstance(route, Route) or (parts := experts.parts()) is None:
        return None
    added = isinstance(layer, MixtureOfExperts) and layer.shared is not None and layer.widening is None
    return parts, route.rule.chosen, added
