"""Answers under random schedules are those of each request alone."""

from functools import cache

import numpy as np
import pytest
from support.engines.schedules import Kind, kinds, play
from support.engines.tiny_engine import run, tiny_engine

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.engine import Engine

FAMILIES = {"full": "llama", "sliding": "gemma3_text", "experts": "qwen3_moe", "hybrid": "qwen3_next"}
FORMATS = ("16", "4")
_OFTEN = {("full", "4"), ("sliding", "16"), ("hybrid", "16")}
SAMPLE = [
    pytest.param(family, kv, marks=pytest.mark.long if (family, kv) in _OFTEN else pytest.mark.slow)
    for family in FAMILIES
    for kv in FORMATS
]
"""Each kind of cache and each format."""
CROWDED = {"kv_cache_tokens": 512, "max_num_seqs": 5}
"""Three long sequences at most have room, so some have to give their pages back."""


@cache
def pool(name: str) -> list[Kind]:
    return kinds(11, 14, 150)


@cache
def alone(name: str, kv: str, kind: Kind) -> list[int]:
    engine = tiny_engine(name, KVFormat.parse(kv), prefix_cache=False, max_draft=0)
    return run(engine, [kind.sequence()])[0]


def crowded(name: str, kv: str, rng: np.random.Generator) -> Engine:
    chunk = int(rng.choice([7, 33, 64, 100]))
    return tiny_engine(name, KVFormat.parse(kv), max_num_batched_tokens=chunk, **CROWDED)


def check(name: str, kv: str, seed: int, schedules: int) -> int:
    """Runs schedules one after another on one engine, so that later ones find what earlier ones left behind: so many tokens are reused."""
    rng = np.random.default_rng(seed)
    engine = crowded(name, kv, rng)
    for _ in range(schedules):
        for outcome in play(engine, pool(name), rng, requests=int(rng.integers(3, 9))):
            whole = alone(name, kv, outcome.kind)
            assert outcome.sequence.finish_reason in ("length", "cancelled")
            assert outcome.tokens == whole[: len(outcome.tokens)]
            if outcome.sequence.finish_reason == "length":
                assert outcome.tokens == whole
        assert engine.cache.usage().used == 0
    return engine.stats().reused_tokens


@pytest.mark.parametrize(("family", "kv"), SAMPLE)
def test_in_any_schedule_each_gets_what_it_has_alone(family, kv):
    assert sum(check(FAMILIES[family], kv, seed, schedules=2) for seed in range(2)) > 0


@pytest.mark.parametrize(("family", "kv"), SAMPLE)
def test_who_gives_pages_back_gets_the_same_later(family, kv):
    """Four that grow together to more pages than there are."""
    name = FAMILIES[family]
    engine = tiny_engine(name, KVFormat.parse(kv), **{**CROWDED, "kv_cache_tokens": 320})
    growing = [Kind(tuple(range(5 + i, 15 + i)), 125, i) for i in range(4)]
    assert run(engine, [kind.sequence() for kind in growing]) == [alone(name, kv, kind) for kind in growing]
    assert engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_thousands_of_schedules_each_gets_what_it_has_alone(family, kv, seed):
    check(FAMILIES[family], kv, 100 + seed, schedules=25)
