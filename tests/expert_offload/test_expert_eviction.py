"""Eviction of experts: the simulation of the benchmark agrees with a real pool, and the pool's half-life is a good one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experts.eviction import best_hits, lrfu_hits
from benchmarks.experts.traces import TRACES
from mlxinfer.expert_offload import ExpertStore
from mlxinfer.expert_offload.scores import HALF_LIFE
from tests.support.formats.expert_files import write_experts

EXPERTS, CHOSEN, SLOTS = 32, 4, 12
LRU, LFU = 0.02, float("inf")


def trace(name: str, steps: int) -> list[np.ndarray]:
    return list(islice(TRACES[name](np.random.default_rng(3), EXPERTS, CHOSEN), steps))


def hit_rate(found: tuple[int, int]) -> float:
    return found[0] / found[1]


@pytest.mark.parametrize("name", [name for name in TRACES if name != "prompts"])
def test_a_pool_hits_as_often_as_its_simulation(tmp_path: Path, name: str) -> None:
    store = ExpertStore(write_experts(tmp_path / "a.experts", 1, EXPERTS), 0, slots={"layers.0": SLOTS}, threads=1)
    pool, steps = store.pools["layers.0"], trace(name, 240)
    for index, chosen in enumerate(steps):
        if 4 * index == len(steps):
            before = pool.hits, pool.misses
        list(pool.waves(chosen))
    hits, misses = pool.hits - before[0], pool.misses - before[1]
    store.close()
    simulated = lrfu_hits(steps, EXPERTS, SLOTS, HALF_LIFE)
    assert hits + misses == simulated[1]
    assert hits == pytest.approx(simulated[0], rel=0.05)


@pytest.mark.parametrize("name", ["zipf", "sticky", "subjects", "prompts"])
def test_recency_and_frequency_together_hit_more_often(name: str) -> None:
    steps = trace(name, 600)
    chosen = hit_rate(lrfu_hits(steps, EXPERTS, SLOTS, HALF_LIFE))
    best = hit_rate(best_hits(steps, EXPERTS, SLOTS))
    assert chosen > hit_rate(lrfu_hits(steps, EXPERTS, SLOTS, LRU)) - 0.005
    assert chosen > hit_rate(lrfu_hits(steps, EXPERTS, SLOTS, LFU)) - 0.02
    assert chosen > 0.8 * best
