"""Several models of a process share its memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
from support.engines.tiny_engine import tiny_model
from support.models.planned import MB, Tiny

from mlxinfer.errors import MemoryPlanError
from mlxinfer.loading.memory import budget as memory_budget
from mlxinfer.loading.memory.budget import MemoryBudget, shares
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.util.device import DeviceMemory

MEMORY = DeviceMemory(400 * MB, 200 * MB)


@dataclass
class Limits:
    """Stands for MLX's allocator."""

    wired: int = 0
    spare: int = 0
    most: int = 0

    def set(self, *, wired: int, spare: int, most: int) -> None:
        self.wired, self.spare, self.most = wired, spare, most

    def lift(self) -> None:
        self.set(wired=0, spare=0, most=0)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    found = Limits()
    monkeypatch.setattr(memory_budget, "limit_memory", found.set)
    monkeypatch.setattr(memory_budget, "lift_limits", found.lift)
    return found


def plan(weights: int = 10 * MB, **options):
    """Plan such a model with the given memory."""
    return lambda memory: plan_memory(Tiny(tiny_model("llama"), weights), memory=memory, **options)


def budget(active: int = 0) -> MemoryBudget:
    return MemoryBudget(lambda: MEMORY, lambda: active)


def test_two_models_get_what_there_is_together(limits: Limits) -> None:
    both = budget()
    first = both.reserve(plan(memory_gb=0.06))
    assert (limits.wired, limits.spare) == (first.plan.used, first.plan.step)
    second = both.reserve(plan(20 * MB))
    assert second.plan.limit == 200 * MB - first.plan.used
    assert both.reserved == first.plan.used + second.plan.used <= MEMORY.usable
    assert (limits.wired, limits.spare) == (both.reserved, first.plan.step + second.plan.step)
    assert limits.most <= MEMORY.usable


def test_a_closed_models_memory_is_there_for_others(limits: Limits) -> None:
    both = budget()
    first = both.reserve(plan())
    alone = first.plan.pool_tokens
    first.release()
    first.release()
    assert (both.reserved, limits.wired, limits.spare, limits.most) == (0, 0, 0, 0)
    second = both.reserve(plan())
    assert second.plan.pool_tokens == alone


def test_a_model_that_nobody_refers_to_any_more_holds_nothing(limits: Limits) -> None:
    both = budget()
    ring: list[object] = [both.reserve(plan(150 * MB))]
    ring.append(ring)  # only the garbage collector finds it
    del ring
    gc.disable()
    try:
        assert both.reserve(plan(150 * MB)).plan.weights == 150 * MB
    finally:
        gc.enable()


def test_a_third_model_is_refused_in_words_that_help(limits: Limits) -> None:
    both = budget()
    kept = both.reserve(plan(170 * MB))
    with pytest.raises(
        MemoryPlanError, match=r"Other models of this process hold 0\.\d+ GB: close them, or give each of them its memory_gb"
    ):
        both.reserve(plan(100 * MB))
    assert both.reserved == kept.plan.used


def test_what_else_mlx_holds_is_not_there_for_models(limits: Limits) -> None:
    assert budget(active=120 * MB).reserve(plan()).plan.limit == 80 * MB


def test_mlx_may_use_what_is_planned_beside_what_it_holds_anyway(limits: Limits) -> None:
    budget(active=50 * MB).reserve(plan(memory_gb=0.06))
    assert limits.most == pytest.approx(110 * 10**6, rel=0.1)


def test_models_that_are_loaded_together_get_shares() -> None:
    small, large = plan(10 * MB), plan(80 * MB)
    sizes = shares([10 * MB, 80 * MB], [small, large], MEMORY)
    assert sum(sizes) <= MEMORY.usable
    both = budget()
    kept = [both.reserve(make) for make in (plan(10 * MB, memory_gb=sizes[0] / 1e9), plan(80 * MB, memory_gb=sizes[1] / 1e9))]
    assert kept[0].plan.context == kept[1].plan.context > 0


def test_what_one_model_cannot_use_goes_to_the_other() -> None:
    few, many = plan(10 * MB, max_context=256, max_num_seqs=1, prefix_cache=False), plan(10 * MB, max_num_seqs=1000)
    sizes = shares([10 * MB, 10 * MB], [few, many], MEMORY)
    assert sizes[0] < 50 * MB < 100 * MB < sizes[1]
    assert sum(sizes) <= MEMORY.usable


def test_models_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(MemoryPlanError, match="a share of the physical memory for 2 models"):
        shares([90 * MB, 100 * MB], [plan(90 * MB), plan(100 * MB)], MEMORY)


def test_weights_that_grow_take_what_the_plan_has_left(limits: Limits) -> None:
    both = budget()
    first = both.reserve(plan(max_context=256, max_num_seqs=1))
    left, weights = first.plan.left, first.plan.weights
    assert left > 10 * MB
    assert first.take(MB) == MB
    assert (first.plan.weights, first.plan.left, both.reserved) == (weights + MB, left - MB, first.plan.used)
    second = both.reserve(plan(100 * MB))  # takes everything that the first did not reserve
    free = MEMORY.usable - first.plan.used - second.plan.used
    assert 0 <= free < left
    assert first.take(50 * MB) == free
    assert both.reserved == MEMORY.usable
    first.release()
    assert first.take(MB) == 0
