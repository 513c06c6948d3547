"""The cache against plain attention over everything seen so far, however the rows are cut into steps and the pages are kept."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.cache_sequences import PLAIN, SPECS, Sequence, run_step
from support.processes.active_memory import active_memory
from support.processes.examples import examples

from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.select import attention_backend
from mlxinfer.cache.base import PAGE, AttentionParams, AttentionSpec, RecurrentSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.pool import PageDemand

PLAIN_ATTENTION = PlainAttention()
BACKENDS = [attention_backend, lambda store: PLAIN_ATTENTION]
FORMATS = [PLAIN, KVFormat(4, 4), KVFormat(8, 3), KVFormat(16, 5), KVFormat(6, 16), KVFormat(2, 8, first16=True)]


def new_cache(chunk: int = 512, kv: KVFormat = PLAIN, backend=attention_backend) -> PagedCache:
    return PagedCache(SPECS, dtype=mx.float32, kv_cache_tokens=PAGE * 64, chunk=chunk, kv=kv, backend=backend)


@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param(BACKENDS[1], marks=pytest.mark.long)], ids=["default", "plain"])
@settings(max_examples=examples(25), deadline=None)
@given(st.sampled_from(FORMATS), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150)), min_size=1, max_size=12), st.data())
def test_any_cut_and_any_neighbours_give_the_same_rows(backend, kv, moves, data):
    cache = new_cache(kv=kv, backend=backend)
    sequences = [Sequence(i, 300, kv) for i in range(3)]
    slots = [cache.open() for _ in sequences]
    for who, count in moves:
        together = data.draw(st.booleans())
        chosen = range(3) if together else [who]
        parts = [(sequences[i], slots[i], min(count, 300 - sequences[i].done)) for i in chosen]
        parts = [p for p in parts if p[2]]
        if parts:
            run_step(cache, parts)


@pytest.mark.long
@pytest.mark.parametrize("kv", FORMATS, ids=lambda kv: kv.name)
@pytest.mark.parametrize("backend", BACKENDS, ids=["default", "plain"])
def test_one_token_at_a_time_across_pages(backend, kv):
    cache, sequence = new_cache(kv=kv, backend=backend), Sequence(5, 140, kv)
    slot = cache.open()
    run_step(cache, [(sequence, slot, 50)])
    for _ in range(90):
        run_step(cache, [(sequence, slot, 1)])


@pytest.mark.parametrize("kv", [PLAIN, KVFormat(4, 4, first16=True)], ids=lambda kv: kv.name)
def test_slots_and_pages_are_reused_without_leaking(kv):
    cache = new_cache(kv=kv)
    for seed in range(4):
        first, second = Sequence(seed, 200, kv), Sequence(seed + 10, 200, kv)
        slots = cache.open(), cache.open()
        run_step(cache, [(first, slots[0], 130), (second, slots[1], 65)])
        cache.release(slots[0])
        third, slot = Sequence(seed + 20, 200, kv), cache.open()
        run_step(cache, [(second, slots[1], 80), (third, slot, 100)])
        cache.release(slots[1])
        cache.release(slot)
    for group in cache.pool.groups:
        assert group.allocator.free == PAGE
        assert group.first is None or group.first.free == PAGE


@pytest.mark.smoke
@pytest.mark.parametrize("kv", [PLAIN, KVFormat(4, 4), KVFormat(3, 8, first16=True)], ids=lambda kv: kv.name)
def test_fork_shares_the_past_and_then_parts(kv):
    cache, sequence = new_cache(kv=kv), Sequence(1, 200, kv)
    slot = cache.open()
    run_step(cache, [(sequence, slot, 100)])
    twin = Sequence(1, 200, kv)
    twin.done = sequence.done
    other = cache.fork(slot)
    run_step(cache, [(sequence, slot, 40)])
    cache.release(slot)
    run_step(cache, [(twin, other, 1)])
    run_step(cache, [(twin, other, 99)])


@pytest.mark.long
@pytest.mark.parametrize("kv", [PLAIN, KVFormat(4, 4, first16=True)], ids=lambda kv: kv.name)
def test_window_pages_are_freed(kv):
    cache, sequence = new_cache(chunk=64, kv=kv), Sequence(2, 1000, kv)
    slot = cache.open()
    while sequence.done < 1000:
        run_step(cache, [(sequence, slot, min(64, 1000 - sequence.done))])
    held = {group.window: len(group.tables[slot].pages) for group in cache.pool.groups}
    assert held[None] == 1000 // PAGE
    assert held[70] <= 3
    assert held[10] <= 1
    first = {group.window: group.first.capacity - group.first.free for group in cache.pool.groups if group.first}
    assert first == ({None: 1, 70: 0, 10: 0} if kv.first16 else {})


@pytest.mark.long
def test_bytes_of_a_decode_step_do_not_grow_with_the_pool():
    """A step replaces open pages; the pool is written in place, and only when a page is full."""
    cache = PagedCache([AttentionSpec(4, 64, 64)], dtype=mx.float32, kv_cache_tokens=PAGE * 200, chunk=512)
    slot = cache.open()
    peaks = []
    for past in (0, PAGE * 100):
        rows = mx.zeros((PAGE * 100 - 1, 4, 64))
        step = cache.begin([Segment(slot, 0, rows.shape[0], past, past)])
        step.attend(0, rows, rows, rows, AttentionParams(1.0))
        mx.eval(step.state)
        cache.commit(step)
        del step, rows
        before = active_memory()
        mx.reset_peak_memory()
        one = mx.zeros((1, 4, 64))
        step = cache.begin([Segment(slot, 0, 1, past + PAGE * 100 - 1, 0)])
        step.attend(0, one, one, one, AttentionParams(1.0))
        mx.eval(step.state)
        cache.commit(step)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] <= peaks[0] + 4 * PAGE * 64 * 4


@pytest.mark.parametrize("tokens", [PAGE * 64, PAGE * 65])
def test_fits_is_asked_of_an_empty_cache_and_room_of_this_one(tokens):
    cache = new_cache()
    assert cache.fits(tokens) == (tokens <= PAGE * 64)
    assert cache.room([PageDemand(None, 0, PAGE * 34), PageDemand(None, 0, PAGE * 30)])
    assert not cache.room([PageDemand(None, 0, PAGE * 35), PageDemand(None, 0, PAGE * 30)])


def test_recurrent_states_follow_their_sequences():
    cache = PagedCache([RecurrentSpec(((3,),))], dtype=mx.float32, kv_cache_tokens=640, chunk=64)

    def running_sum(x, states):
        total = states[0][:, None] + mx.cumsum(x, axis=1)
        return total, (total[:, -1],)

    rng = np.random.default_rng(0)
    data = [mx.array(rng.standard_normal((40, 3)).astype(np.float32)) for _ in range(3)]
    slots, done = [cache.open() for _ in data], [0, 0, 0]
    for counts in ((5, 5, 2), (1, 1, 1), (7, 3, 7), (1, 0, 2)):
        segments, start = [], 0
        for i, count in enumerate(counts):
            if count:
                segments.append(Segment(slots[i], start, count, done[i], 40))
                start += count
        step = cache.begin(segments)
        live = [i for i, c in enumerate(counts) if c]
        inputs = mx.concatenate([data[i][done[i] : done[i] + counts[i]] for i in live])
        got = np.array(step.recur(0, inputs, running_sum))
        want = np.concatenate([np.cumsum(np.array(data[i]), 0)[done[i] : done[i] + counts[i]] for i in live])
        np.testing.assert_allclose(got, want, atol=1e-5)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    cache.release(slots[0])
    assert np.array(cache._recurrent[0].of(cache.open())[0]).tolist() == [[0, 0, 0]]
