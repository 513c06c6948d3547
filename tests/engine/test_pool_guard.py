"""Pools of experts shrink under memory pressure and for other models, and grow again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.engines.tiny_engine import GOLDEN, tiny_model
from support.models.planned import MB, Tiny

from benchmarks.experts.models import SHAPES, make_model
from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.config import EngineArgs
from mlxinfer.engine.open_model import prepare_models
from mlxinfer.engine.pool_guard import _CALM_LOOKS, PoolGuard, _watch
from mlxinfer.errors import MemoryPlanError
from mlxinfer.expert_offload import OffloadStats
from mlxinfer.loading.memory import hit_rates
from mlxinfer.loading.memory.budget import MemoryBudget
from mlxinfer.loading.memory.experts import ExpertDemand, ExpertLayer
from mlxinfer.loading.memory.hit_rates import repeated_share
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.util.device import DeviceMemory
from mlxinfer.util.memory_pressure import Pressure

LAYERS = tuple(ExpertLayer(key=f"layer{i}", experts=64, chosen=4, nbytes=64 * MB) for i in range(2))
LEAST = 2 * 8 * MB


class Pools:
    """Notes the sizes that an engine is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def resize_by(self, decide: Callable[[], int]) -> None:
        self.asked.append(decide())


class Memory:
    """Memory under a pressure that tests set."""

    def __init__(self) -> None:
        self.pressure = Pressure(0, 0)

    def __call__(self, margin: int) -> Pressure:
        assert margin == 48 * MB  # the larger of two pools
        return self.pressure


@pytest.fixture
def budget(monkeypatch) -> MemoryBudget:
    for name in ("limit_memory", "lift_limits"):
        monkeypatch.setattr(f"mlxinfer.loading.memory.budget.{name}", lambda **_: None)
    return MemoryBudget(lambda: DeviceMemory(400 * MB, 200 * MB), lambda: 0)


@pytest.fixture
def guarded(budget) -> tuple[PoolGuard, Pools, Memory]:
    model = Tiny(tiny_model("mixtral"), weight_bytes=(10 + 128) * MB)
    demand = ExpertDemand(layers=LAYERS, wanted=96 * MB)
    held = budget.reserve(lambda memory: plan_memory(model, experts=demand, memory=memory, max_context=256, prefix_cache=False))
    pools, memory = Pools(), Memory()
    return PoolGuard(pools, held, memory), pools, memory


def test_pools_shrink_by_what_is_short_but_not_below_their_minimum(guarded, budget):
    guard, pools, memory = guarded
    before = budget.planned
    memory.pressure = Pressure(10 * MB, 0)
    guard.check()
    assert pools.asked == [guard.allowed] == [86 * MB]
    assert budget.planned == before - 10 * MB
    memory.pressure = Pressure(1000 * MB, 0)
    guard.check()
    guard.check()
    assert pools.asked == [86 * MB, LEAST]
    assert guard.can_give == 0


def test_pools_grow_slowly_after_the_pressure_is_over(guarded):
    guard, pools, memory = guarded
    memory.pressure = Pressure(40 * MB, 0)
    guard.check()
    memory.pressure = Pressure(0, 16 * MB)
    for _ in range(_CALM_LOOKS - 1):
        guard.check()
    assert pools.asked == [56 * MB]
    guard.check()
    assert pools.asked[1:] == [64 * MB]  # half of what is spare
    memory.pressure = Pressure(0, 1000 * MB)
    for _ in range(10 * _CALM_LOOKS):
        guard.check()
    assert guard.allowed == guard.planned == 96 * MB
    steps = [later - earlier for earlier, later in zip(pools.asked[1:], pools.asked[2:], strict=False)]
    assert max(steps) <= 12 * MB


def test_memory_that_another_model_got_does_not_return(guarded, budget):
    guard, _, memory = guarded
    guard.give(60 * MB)
    assert guard.allowed == 36 * MB
    guard.give(60 * MB)
    assert guard.allowed == LEAST
    other = budget.reserve(lambda memory: plan_memory(Tiny(tiny_model("llama"), 120 * MB), memory=memory, max_context=64))
    memory.pressure = Pressure(0, 1000 * MB)
    for _ in range(20 * _CALM_LOOKS):
        guard.check()
    assert budget.planned <= 200 * MB
    small = guard.allowed
    assert small < guard.planned
    other.release()
    for _ in range(20 * _CALM_LOOKS):
        guard.check()
    assert guard.allowed == guard.planned


def test_the_thread_ends_with_its_guard(guarded):
    guard, pools, memory = guarded
    memory.pressure = Pressure(10 * MB, 0)
    looks = iter([False, True])  # of `closing`: one look, then the end
    closing = SimpleNamespace(wait=lambda seconds: next(looks))
    _watch(weakref.ref(guard), closing)
    assert pools.asked == [86 * MB]
    gone = weakref.ref(PoolGuard(pools, guard._reservation, memory))
    gc.collect()
    _watch(gone, SimpleNamespace(wait=lambda seconds: False))  # returns at once
    guard.close()
    _watch(weakref.ref(guard), guard._closing)


def write_sparse(folder: Path) -> Path:
    """A model with more bytes of experts than of anything else."""
    shape = replace(SHAPES["qwen3-moe"], layers=12, hidden=256, heads=4, kv_heads=2, head=64, inner=256, experts=64, chosen=4)
    return make_model("sparse", folder, shape)


def tokens(llm: LLM) -> list[int]:
    return llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].token_ids


def test_answers_stay_the_same_while_pools_shrink_and_grow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    with LLM(GOLDEN / "qwen3_moe", experts_memory=0) as whole:
        expected = tokens(whole)
    with LLM(GOLDEN / "qwen3_moe", experts_memory=0.0002) as llm:
        guard, store = llm._client.opened.guard, llm.loaded.experts.store
        before = store.resident_bytes
        assert tokens(llm) == expected
        guard.give(2**30)
        assert store.resident_bytes == before  # until the next step
        assert tokens(llm) == expected
        assert store.resident_bytes < before
        assert llm.plan.experts.pools == guard.allowed
        stats = llm.stats()
        assert stats.experts == 12
        assert stats.expert_slots == sum(pool.slots for pool in store.pools.values())
        assert stats.expert_misses > 0
        assert stats.expert_bytes_read > 0
        assert repeated_share(GOLDEN / "qwen3_moe") is None
        monkeypatch.setattr(hit_rates, "_LEAST_CHOICES", 10)
    assert 0 <= repeated_share(GOLDEN / "qwen3_moe") < 1


def test_hits_of_earlier_processes_say_how_much_repeats(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    (tmp_path / "experts").mkdir()
    model = tmp_path / "model.gguf"
    stats = OffloadStats(0, 2500, 1500, 0, 0, 0.0, 0, 50, 100)
    hit_rates.keep_repeated_share(model, replace(stats, hits=10, misses=1))
    hit_rates.keep_repeated_share(model, replace(stats, slots=100))
    assert repeated_share(model) is None
    hit_rates.keep_repeated_share(model, stats)
    assert repeated_share(model) == pytest.approx(0.25)
    memory = ExpertDemand(layers=LAYERS).pooled(64 * MB, 0)
    assert memory.hit_rate(repeated_share(model)) == pytest.approx(2500 / 4000)
    (file,) = (tmp_path / "experts").iterdir()
    for text in ("", "{", "[]", '{"repeated": 2}', '{"repeated": null}'):
        file.write_text(text)
        assert repeated_share(model) is None


def test_an_idle_engine_shrinks_its_pools_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))

    async def run() -> None:
        async with AsyncLLM(GOLDEN / "qwen3_moe", experts_memory=0.0002) as llm:
            await llm.ready()
            store = llm.loaded.experts.store
            before, spare = store.resident_bytes, llm.spare_expert_bytes
            assert 0 < await llm.shrink_experts(2**30) <= spare
            assert store.resident_bytes < before
            assert llm.spare_expert_bytes == 0
            assert await llm.shrink_experts(2**30) == 0

    asyncio.run(run())


def test_a_further_model_needs_no_more_than_the_minimum_of_its_pools(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    model = write_sparse(tmp_path)
    with prepare_models(EngineArgs(model, max_context=256)) as found:
        nbytes, whole = sum(layer.nbytes for layer in found.target.expert_layers), 2**40
        least = found.least(DeviceMemory(whole, whole))
        short = DeviceMemory(whole, least - nbytes // 3)
        pooled = found.least(short)
        assert found.plan(short).experts is not None
        assert least - nbytes < pooled < least
        demand = ExpertDemand(layers=found.target.expert_layers)
        assert pooled <= least - nbytes + max(demand.least, 2 * max(layer.nbytes for layer in demand.layers)) + 2**20
        assert found.plan(DeviceMemory(whole, pooled)).context == 256
        with pytest.raises(MemoryPlanError, match="with its experts read from the disk"):
            found.least(DeviceMemory(whole, 2**20))
