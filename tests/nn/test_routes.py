"""Routes with the kernel and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.emulated import counting, needs_emulator

from mlxinfer.kernels_metal import emulator, kernel_trial
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.kernel_trial import SWITCH
from mlxinfer.kernels_metal.router import reference
from mlxinfer.kernels_metal.router.reference import SCORES, Rule
from mlxinfer.nn import routes
from mlxinfer.nn.routes import Route, biased_route, softmax_then_top, top_then_softmax

LAUNCHES = Counter[str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[LAUNCHES]:
    """Kernels as on a GPU, in the emulator, and how often each was launched."""
    found: LAUNCHES = Counter()
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)

    routes.TRIAL.forget()
    with counting(found):
        yield found
    routes.TRIAL.forget()


def sorted_by_expert(experts: mx.array, shares: mx.array) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.array(experts), axis=-1)
    return np.take_along_axis(np.array(experts), order, -1), np.take_along_axis(np.array(shares), order, -1)


BIAS = mx.array(np.random.default_rng(0).normal(size=24).astype(np.float32))
ROUTES = {
    "softmax": lambda: softmax_then_top(3, normalized=False),
    "normalized": lambda: softmax_then_top(5, normalized=True, gains=BIAS),
    "top": lambda: top_then_softmax(4),
    "biased": lambda: biased_route(3, BIAS, added=1e-20, scale=2.5),
    "without a bias": lambda: biased_route(2, None, normalized=False, least=0.5),
    "groups": lambda: biased_route(3, BIAS, groups=4, kept=2, added=0.1),
    "ranked": lambda: biased_route(2, None, "softmax", groups=3, kept=1, ranked=1, scale=0.5),
}


@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_one_launch_after_a_trial_and_the_same_answers(name: str, dtype: mx.Dtype, launches: LAUNCHES) -> None:
    route = ROUTES[name]()
    numbers = np.stack([np.random.default_rng(row).permutation(24) for row in range(5)])
    logits = mx.array((numbers / 4 - 3).astype(np.float32)).astype(dtype)
    route(logits)
    launches.clear()
    found = route(logits)
    assert launches == {"router": 1}
    route.in_plain_operations()
    for got, expected in zip(sorted_by_expert(*found), sorted_by_expert(*route(logits)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert launches == {"router": 1}


@needs_emulator
def test_each_model_has_few_variants_and_each_is_tried(launches: LAUNCHES) -> None:
    first, second = softmax_then_top(2, normalized=True), softmax_then_top(2, normalized=True)
    for rows in (1, 3, 1):
        for route in (first, second):
            route(mx.zeros((rows, 24)))
    assert launches == {"router": 1 + 6}
    assert len(routes.TRIAL.verdicts) == 1


def test_wrong_answers_and_large_routers_stay_with_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**_: Any) -> Any:
        return lambda *, output_shapes, output_dtypes, **_: [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    routes.TRIAL.forget()
    logits = mx.array(np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32))
    with run_with(wrong):
        for route in (top_then_softmax(4), top_then_softmax(34)):
            plain = reference.choose_experts(logits, route.rule)
            for got, expected in zip(route(logits), plain, strict=True):
                assert np.array_equal(np.array(got), np.array(expected))
    lines = kernel_trial.lost_lines()
    assert any(
        "4 of 40, by logits, float32: plain MLX instead: a Metal kernel failed its trial: its answers differ" in line for line in lines
    )
    assert any("no choice of 34 of 40 experts" in line for line in lines)
    routes.TRIAL.forget()


def test_a_model_tells_at_load_that_mlx_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        route = top_then_softmax(34)

        class router:
            matrix = mx.zeros((40, 8))

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    routes.TRIAL.forget()
    (line,) = routes.fallback_lines([object(), Part()], mx.float32)
    assert "no choice of 34 of 40 experts" in line
    routes.TRIAL.forget()


def test_the_switch_leaves_routes_to_mlx(launches: LAUNCHES, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    top_then_softmax(2)(mx.zeros((1, 8)))
    assert not launches


@st.composite
def rules(draw: st.DrawFn) -> tuple[Rule, int]:
    groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    members = draw(st.sampled_from([1, 2, 7, 16, 20]))
    kept = draw(st.integers(1, groups))
    numbers = [draw(st.sampled_from(choices)) for choices in ((0.0, 0.5), (0.0, 1e-20, 0.1), (1.0, 2.5))]
    ranked = draw(st.integers(1, 3))
    chosen = draw(st.integers(1, min(22, members * kept)))
    return Rule(chosen, draw(st.sampled_from(SCORES)), draw(st.booleans()), *numbers, groups, kept, ranked), groups * members


@needs_emulator
@pytest.mark.long
@given(case=rules(), rows=st.sampled_from([1, 7, 33]), has=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 99))
def test_any_rule_gives_what_plain_mlx_gives(case: tuple[Rule, int], rows: int, has: tuple[bool, bool], seed: int) -> None:
    (rule, experts), random = case, np.random.default_rng(seed)
    logits = mx.array(random.normal(size=(rows, experts)).astype(np.float32))
    bias, gains = (mx.array(random.normal(size=experts).astype(np.float32)) if each else None for each in has)
    with run_with(emulator.metal_kernel):
        found = routes.launcher.choose_experts(logits, rule, bias, gains)
    plain = Route(rule, bias, gains)(logits)
    for got, expected in zip(sorted_by_expert(*found), sorted_by_expert(*plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
