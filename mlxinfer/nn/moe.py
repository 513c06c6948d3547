"""Mixtures of experts: a router sends each token through a few experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..kernels_cpu import Packed, Router
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .activations import Gate
from .linear import JoinedLinear, Linear, NamedProjection
from .mixed_scales import is_mixed, narrowed, restored
from .norms import RMSNorm
from .weights import Dense, Quantized, Recipe, Weights

Route = Callable[[mx.array], tuple[mx.array, mx.array]]
"""Router logits `[T, experts]` to the chosen experts `[T, k]` and their weights `[T, k]` float32."""

SORT_FROM = 64
"""Minimum rows for sorting them by expert, so that each matrix is read once."""


class ExpertLinear(Linear):
    """A matrix `[experts, out, in]` with optional biases `[experts, out]`. `experts` `[...]` selects the matrix for each row of `x`
    `[..., 1, in]`."""

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
class Experts:
    """The gated feed-forward layers of all experts."""

    gate_up: JoinedLinear
    """`[experts, inner, hidden]` for the gate and for the up projection."""
    down: ExpertLinear
    """`[experts, hidden, inner]`."""
    gate: Gate

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Compute x `[T, hidden]` with the chosen experts `[T, k]`: `[T, k, hidden]`."""
        return _through_experts(
            lambda rows, chosen, is_sorted: self.gate_up.gated(self.gate, rows, chosen, is_sorted), self.down, x, experts
        )


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """The feed-forward layers of all experts, without a gate."""

    up: ExpertLinear
    """`[experts, inner, hidden]`."""
    down: ExpertLinear
    """`[experts, hidden, inner]`."""
    activation: Callable[[mx.array], mx.array]
    """Applied between `up` and `down`."""

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Compute x `[T, hidden]` with the chosen experts `[T, k]`: `[T, k, hidden]`."""
        return _through_experts(lambda rows, chosen, is_sorted: self.activation(self.up(rows, chosen, is_sorted)), self.down, x, experts)


def _through_experts(inner: Callable[[mx.array, mx.array, bool], mx.array], down: ExpertLinear, x: mx.array, experts: mx.array) -> mx.array:
    """Apply `inner(rows, experts, is_sorted)` and then `down` with each row's chosen experts."""
    chosen, rows, back = experts, x[:, None, None], None
    if experts.size >= SORT_FROM and not isinstance(down.matrix, Packed):
        order = mx.argsort(experts.flatten())
        back = mx.argsort(order)
        chosen = experts.flatten()[order]
        # A new axis of one would have a stride of one number, which MLX's CUDA product takes for that of rows.
        rows = x[order // experts.shape[-1]].reshape(-1, 1, x.shape[-1])
    y = down(inner(rows, chosen, back is not None), chosen, back is not None).squeeze(-2)
    return y if back is None else y[back].reshape(*experts.shape, -1)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A feed-forward layer for every token, optionally weighted by the sigmoid of a gate."""

    mlp: Callable[[mx.array], mx.array]
    """`[T, hidden]` to the same shape."""
    gate: Linear | None = None
    """`[1, hidden]`."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.mlp(x)
        return y if self.gate is None else mx.sigmoid(self.gate(x)) * y


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
        y = (self.experts(read, experts) * shares.astype(x.dtype)[..., None]).sum(axis=-2)
        y = y if self.widening is None else self.widening(y)
        y = y if self.shared is None else y + self.shared(x)
        return y if onto is None else onto + y


@dataclass(frozen=True, slots=True)
class SoftmaxThenTop:
    """Takes probabilities over all experts, then the `count` best."""

    count: int
    normalized: bool
    """True if the weights are rescaled to sum to one."""

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        shares = mx.softmax(logits.astype(mx.float32), axis=-1)
        best = _top_experts(shares, self.count)
        shares = mx.take_along_axis(shares, best, axis=-1)
        return best, shares / shares.sum(axis=-1, keepdims=True) if self.normalized else shares

    @property
    def router(self) -> Router:
        """The same for the CPU kernels."""
        return Router(self.count, "softmax", normalized=self.normalized)


def softmax_then_top(count: int, *, normalized: bool) -> Route:
    """Return a route by probabilities over all experts, then the `count` best; `normalized` rescales them to sum to one."""
    return SoftmaxThenTop(count, normalized)


@dataclass(frozen=True, slots=True)
class TopThenSoftmax:
    """Takes the `count` best experts, then probabilities over them."""

    count: int

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        best = _top_experts(logits, self.count)
        return best, mx.softmax(mx.take_along_axis(logits, best, axis=-1).astype(mx.float32), axis=-1)

    @property
    def router(self) -> Router:
        """The same for the CPU kernels."""
        return Router(self.count, "none")


def top_then_softmax(count: int) -> Route:
    """Return a route by the `count` best experts, then probabilities over them."""
    return TopThenSoftmax(count)


@dataclass(frozen=True, slots=True)
class BiasedRoute:
    """Scores experts by a sigmoid, or a softmax over all. A learnt bias affects the choice of experts, not their weights
    (arXiv:2408.15664). Experts may be limited to the best groups (arXiv:2412.19437)."""

    count: int
    bias: mx.array | None
    """float32 `[experts]`, added to the scores for the choice of experts."""
    scores: Callable[[mx.array], mx.array] = mx.sigmoid
    """Router logits `[T, experts]` to scores of the same shape, float32."""
    normalized: bool = True
    """True if the weights are divided by their sum."""
    least: float = 0.0
    """Minimum of that sum."""
    added: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    """Groups with the experts of a token: those whose best scores have the largest sum."""
    ranked: int = 2
    """Best scores of a group that are summed."""

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        scores = self.scores(logits.astype(mx.float32))
        wanted = scores if self.bias is None else scores + self.bias
        best = _top_experts(self._from_groups(wanted) if self.kept < self.groups else wanted, self.count)
        shares = mx.take_along_axis(scores, best, axis=-1)
        if self.normalized:
            shares = shares / (mx.maximum(shares.sum(axis=-1, keepdims=True), self.least) + self.added)
        return best, shares * self.scale

    @property
    def router(self) -> Router | None:
        """The same for the CPU kernels; None if they do not know the scores."""
        known = "sigmoid" if self.scores is mx.sigmoid else "softmax" if self.scores is softmax_of_all else None
        if known is None:
            return None
        numbers = self.normalized, self.least, self.added, self.scale
        return Router(self.count, known, self.bias, *numbers, self.groups, self.kept, self.ranked)

    def _from_groups(self, wanted: mx.array) -> mx.array:
        rows, experts = wanted.shape
        grouped = wanted.reshape(rows, self.groups, experts // self.groups)
        ranks = mx.topk(grouped, min(self.ranked, grouped.shape[-1]), axis=-1).sum(axis=-1)
        chosen = mx.argpartition(ranks, kth=-self.kept, axis=-1)[..., -self.kept :]
        inside = mx.put_along_axis(mx.zeros(ranks.shape, mx.bool_), chosen, mx.array(True), axis=-1)
        return mx.where(inside[..., None], grouped, -mx.inf).reshape(rows, experts)


def softmax_of_all(logits: mx.array) -> mx.array:
    """Return probabilities over all experts, for `BiasedRoute.scores`."""
    return mx.softmax(logits, axis=-1)


def _top_experts(scores: mx.array, count: int) -> mx.array:
    if count >= scores.shape[-1]:
        return mx.broadcast_to(mx.arange(scores.shape[-1], dtype=mx.uint32), scores.shape)
    return mx.stop_gradient(mx.argpartition(scores, kth=-count, axis=-1)[..., -count:])  # a choice has no gradient
