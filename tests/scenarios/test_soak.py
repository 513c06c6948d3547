"""Long runs leave no array, graph, page or memory behind."""

import gc
import io

import mlx.core as mx
import numpy as np
import psutil
import pytest
from support.engines.schedules import kinds, play
from support.engines.tiny_engine import UNMEASURED, request, tiny_engine
from support.processes.active_memory import active_memory

from mlxinfer.engine.core.engine import Engine


def live_arrays() -> int:
    gc.collect()
    return sum(isinstance(o, mx.array) for o in gc.get_objects())


def graph_edges(engine: Engine) -> int:
    """Edges of whatever the cache's arrays still hang on."""
    dot = io.StringIO()
    mx.export_to_dot(dot, [a for store in engine.cache._stores.values() for a in store.arrays])
    return dot.getvalue().count("->")


def drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def soak(steps: int) -> tuple[Engine, list[tuple[int, int, int, int]]]:
    """Sequences come and go at random for so many decode steps; what is there now and then, when all have ended."""
    gc.collect()
    gc.freeze()
    rng = np.random.default_rng(5)
    engine = tiny_engine(max_num_seqs=6, kv_cache_tokens=1024, prefix_cache_tokens=512, **UNMEASURED)
    pool = kinds(5, 20, 60)
    for kind in pool:  # so that the prefix cache has all of them from the beginning
        engine.add(kind.sequence())
    drain(engine)
    samples = []
    for step in range(steps):
        if len(engine.scheduler.running) + len(engine.scheduler.waiting) < 6 and rng.random() < 0.2:
            engine.add(pool[int(rng.integers(len(pool)))].sequence())
        if rng.random() < 0.01 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[0])
        engine.step()
        if step % (steps // 10) == steps // 10 - 1:
            drain(engine)
            samples.append((live_arrays(), graph_edges(engine), active_memory(), psutil.Process().memory_info().rss))
    return engine, samples


def flat(samples: list[tuple[int, int, int, int]]) -> None:
    """The second half is not above the first half's most, but for what an allocator may keep."""
    half = len(samples) // 2
    for early, late, slack in zip(zip(*samples[:half], strict=True), zip(*samples[half:], strict=True), (8, 4, 2**18, 2**23), strict=True):
        assert max(late) <= max(early) + slack


@pytest.mark.long
def test_nothing_grows():
    _, samples = soak(1_000)
    flat(samples)


@pytest.mark.slow
def test_nothing_grows_in_50_000_steps():
    _, samples = soak(50_000)
    flat(samples)


@pytest.mark.long
def test_hundreds_of_requests_of_which_many_are_cancelled_leave_an_empty_pool():
    engine = tiny_engine(max_num_seqs=8, kv_cache_tokens=1024)
    outcomes = play(engine, kinds(9, 40, 100), np.random.default_rng(9), requests=200, cancelled=0.3)
    assert len(outcomes) == 200
    assert sum(o.sequence.finish_reason == "cancelled" for o in outcomes) > 30
    assert engine.cache.usage().used == 0
    engine.cache.pool.index.clear()
    assert engine.cache.usage().cached == 0
    assert engine.stats().running == engine.stats().waiting == 0


def test_one_long_answer_holds_no_more_and_more():
    engine = tiny_engine(max_context=256, max_num_seqs=1, max_draft=0)
    engine.add(request([1, 2, 3], 200))
    counts = []
    while not engine.idle:
        engine.step()
        counts.append(graph_edges(engine))
    assert len(counts) > 100
    assert max(counts[50:]) <= max(counts[:50])
