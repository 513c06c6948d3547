"""Routes choose a token's experts from the logits of a router. On a GPU one kernel does, if it passed its trial on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels_cpu import Router
from ..kernels_metal.kernel_speed import Step, compare
from ..kernels_metal.kernel_trial import KernelTrial, Speeds, Verdict, choice_line, difference, kernels_in_use, unless_slower
from ..kernels_metal.router import launcher, reference
from ..kernels_metal.router.reference import Rule

Choice = Callable[[mx.array], tuple[mx.array, mx.array]]
_ROWS = 3
_KNOWN_CHOICES = 64
"""Shapes of logits for which a route caches how its choice is computed."""
_MOST_ERROR = 0.02
"""Bound of `difference` in the trial."""


class Route:
    """Router logits `[T, experts]` to the chosen experts uint32 `[T, k]` and their weights float32 `[T, k]`.

    The order of a row's experts depends on the device, and so does the choice between equal scores (kernels_metal/router/README.md).
    """

    def __init__(self, rule: Rule, bias: mx.array | None = None, gains: mx.array | None = None) -> None:
        """`bias` and `gains` are float32 `[experts]`: see `reference.choose_experts`."""
        self.rule = rule
        self.bias = bias
        self.gains = gains
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._fuses = kernels_in_use()

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        if not self._fuses:
            return self._plain(logits)
        known, key = self._choices, (logits.shape, logits.dtype, TRIAL.age)
        choice = known.get(key)
        if choice is None:
            if len(known) >= _KNOWN_CHOICES:
                known.clear()
            choice = known[key] = self._choice_from(logits)
        return choice(logits)

    @property
    def router(self) -> Router:
        """The same for the CPU kernels."""
        rule = self.rule
        sums = rule.normalized, rule.least, rule.added, rule.scale
        return Router(rule.chosen, rule.scores, self.bias, *sums, rule.groups, rule.kept, rule.ranked, self.gains)

    def in_plain_operations(self) -> None:
        """Switch to differentiable operations, which the kernel is not."""
        self._fuses = False

    def kind(self, dtype: mx.Dtype, experts: int) -> tuple[object, ...]:
        """Return the kind of `TRIAL` for logits `[T, experts]` of this dtype."""
        rule, has = self.rule, (self.bias is not None, self.gains is not None)
        return dtype, experts, rule.chosen, rule.scores, rule.normalized, rule.groups, rule.kept, rule.ranked, *has

    def _plain(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        return reference.choose_experts(logits, self.rule, self.bias, self.gains)

    def _choice_from(self, logits: mx.array) -> Choice:
        """Return the computation for logits of this shape."""
        if TRIAL.obstacle(*self.kind(logits.dtype, logits.shape[1])) is not None:
            return self._plain
        launch = launcher.launch_of(logits, self.rule, biased=self.bias is not None, gained=self.gains is not None)
        vectors = launcher.vectors_of(self.rule, self.bias, self.gains)

        def run(logits: mx.array) -> tuple[mx.array, mx.array]:
            experts, shares = launch.run([logits, *vectors])
            return experts, shares

        return run


def softmax_then_top(count: int, *, normalized: bool, gains: mx.array | None = None) -> Route:
    """Return a route by probabilities over all experts, then the `count` best; `normalized` rescales them to sum to one. `gains` float32
    `[experts]` are factors of the weights after that."""
    return Route(Rule(count, "softmax", normalized), gains=gains)


def top_then_softmax(count: int) -> Route:
    """Return a route by the `count` best experts, then probabilities over them."""
    return Route(Rule(count, "none"))


def biased_route(
    count: int,
    bias: mx.array | None,
    scores: str = "sigmoid",
    *,
    normalized: bool = True,
    least: float = 0.0,
    added: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    kept: int = 1,
    ranked: int = 2,
) -> Route:
    """Return a route by scores, "sigmoid" or "softmax" over all experts. A learnt `bias` float32 `[experts]` affects the choice of experts,
    not their weights (arXiv:2408.15664). Other arguments are those of `Rule`."""
    return Route(Rule(count, scores, normalized, least, added, scale, groups, kept, ranked), bias)


def fallback_lines(parts: Iterable[object], dtype: mx.Dtype) -> list[str]:
    """Describe choices of experts that MLX computes on a GPU. Runs the trials: some of `parts` have a `router` and a `route`; `dtype` is
    that of the logits."""
    pairs = [(getattr(part, "route", None), getattr(part, "router", None)) for part in parts]
    kinds = {route.kind(dtype, router.matrix.shape[0]) for route, router in pairs if isinstance(route, Route) and router is not None}
    return TRIAL.lines(kinds)


def _check_choice(dtype: mx.Dtype, experts: int, *rest: Any) -> str | None:
    """`rest` are the further arguments of `Route.kind`."""
    rule, has = _example_rule(*rest[:-2]), rest[-2:]
    logits = _different_logits(experts).astype(dtype)
    bias, gains = (mx.random.normal((experts,), key=mx.random.key(seed)) * 0.2 + 1 for seed in (1, 2))
    vectors = [vector if given else None for vector, given in zip((bias, gains), has, strict=True)]
    found = [_spread(*way(logits, rule, *vectors), experts) for way in (launcher.choose_experts, reference.choose_experts)]
    errors = [error for got, expected in zip(*found, strict=True) if (error := difference(got, expected, _MOST_ERROR))]
    return f"its answers {errors[0]}" if errors else None


def _different_logits(experts: int) -> mx.array:
    """Return float32 `[rows, experts]` whose numbers are different in every dtype: plain MLX may choose another one of equal experts."""
    random = np.random.default_rng(experts)
    positive = (np.arange(0x3F00, 0x3F00 + launcher.MOST_EXPERTS // 2, dtype=np.uint32) << 16).view(np.float32)  # bfloat16 from 0.5 on
    numbers = np.concatenate([positive, -positive])
    return mx.array(np.stack([random.choice(numbers, experts, replace=False) for _ in range(_ROWS)]))


def _spread(experts: mx.array, shares: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return 1 for each chosen expert and its weight, both `[T, count]`, 0 for others."""
    nothing = mx.zeros((experts.shape[0], count))
    return mx.put_along_axis(nothing, experts, mx.array(1.0), axis=-1), mx.put_along_axis(nothing, experts, shares, axis=-1)


def _speeds(dtype: mx.Dtype, experts: int, *rest: Any) -> Speeds:
    """Compare choices for one row, each of which changes the next one's logits."""
    rule, has = _example_rule(*rest[:-2]), rest[-2:]
    logits, vectors = _different_logits(experts)[:1].astype(dtype), [mx.ones((experts,)) if given else None for given in has]
    mx.eval(logits, vectors)

    def by(choose: Callable[..., tuple[mx.array, mx.array]]) -> Step:
        return lambda x, _: x + choose(x, rule, *vectors)[1][:, :1].astype(dtype)

    return {1: compare(by(launcher.choose_experts), by(reference.choose_experts), logits, busy=True)}


def _example_rule(chosen: int, scores: str, normalized: bool, groups: int, kept: int, ranked: int) -> Rule:
    return Rule(chosen, scores, normalized, 0.01, 0.001, 1.5, groups, kept, ranked)


def _describe(kind: tuple[Any, ...], verdict: Verdict) -> str:
    dtype, experts, chosen, scores, *_ = kind
    return (
        f", {chosen} of {experts}, by {'logits' if scores == 'none' else scores}, {str(dtype).rpartition('.')[2]}: {choice_line(verdict)}"
    )


TRIAL = KernelTrial("choices of experts", _check_choice, speeds=_speeds, choose=unless_slower, describe=_describe)
"""By the arguments of `Route.kind`."""
