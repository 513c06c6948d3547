"""Memory of a cache, counted from the live arrays."""

import gc
from functools import cache

import mlx.core as mx
import pytest
from support.processes.active_memory import active_memory

from mlxinfer import kernels_cpu
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.select import attention_backend
from mlxinfer.cache.base import PAGE, AttentionParams, AttentionSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.store import LayerStore
from mlxinfer.loading.memory.step import growth

LAYERS, TOKENS, CHUNK = 8, 3000, 256
SPECS = [AttentionSpec(2, 64, 64)] * LAYERS
PLAIN = PlainAttention()


def feed(cache: PagedCache, slot: int, past: int, count: int, *, answers: bool) -> None:
    """Keys and values of every layer, as a step of a model with `LAYERS` layers has them; `answers` computes attention as well."""
    rows = mx.random.normal((count, 2, 64)).astype(mx.bfloat16)
    step = cache.begin([Segment(slot, 0, count, past, TOKENS)])
    x = mx.zeros((count, 2, 64), mx.bfloat16)
    for layer in range(LAYERS):
        # What a layer attends with hangs on the layer before it.
        x = step.attend(layer, rows + 0 * x, rows, rows, AttentionParams(0.1))
    mx.eval(step.state, x if answers else [])
    del x, rows
    if step.needs_commit:
        cache.commit(step)


def filled(kv: KVFormat) -> tuple[PagedCache, int, int]:
    """A cache with a sequence, its slot, and the bytes that are alive because of it."""
    gc.collect()  # what tests before this one left must not go meanwhile
    mx.clear_cache()
    before = active_memory()
    cache = PagedCache(SPECS, dtype=mx.bfloat16, kv_cache_tokens=TOKENS, chunk=CHUNK, kv=kv, backend=lambda store: PLAIN)
    slot = cache.open()
    for past in range(0, TOKENS, CHUNK):
        feed(cache, slot, past, min(CHUNK, TOKENS - past), answers=False)
    return cache, slot, active_memory() - before


@cache
def plain_bytes() -> tuple[int, int]:
    """Bytes of a cache in bfloat16: of its arrays, and alive because of it."""
    plain, _, alive = filled(KVFormat())
    return held(plain), alive


def held(cache: PagedCache) -> int:
    """Bytes of its arrays."""
    return sum(a.nbytes for store in cache._stores.values() for a in store.arrays)


@pytest.mark.parametrize(
    ("kv", "share"),
    [
        (KVFormat(4, 4), 0.30),
        *(pytest.param(kv, share, marks=pytest.mark.long) for kv, share in ((KVFormat(8, 8), 0.55), (KVFormat(8, 4), 0.43))),
        (KVFormat(4, 4, True), 0.33),
    ],
)
def test_bytes_of_a_token(kv, share):
    plain_held, plain_alive = plain_bytes()
    cache, _, alive = filled(kv)
    # Both have an open page in bfloat16.
    assert held(cache) < share * plain_held
    assert alive < share * plain_alive
    assert abs(alive - held(cache)) < 0.02 * alive
    assert PagedCache.token_bytes(SPECS, mx.bfloat16, kv) <= share * PagedCache.token_bytes(SPECS, mx.bfloat16)


def peak_of_a_step(kv: KVFormat, backend) -> int:
    """Beyond nothing at all: the cache, and what a step of prefill behind a long past takes for a while."""
    mx.clear_cache()
    before = active_memory()
    cache = PagedCache(SPECS, dtype=mx.bfloat16, kv_cache_tokens=TOKENS, chunk=CHUNK, kv=kv, backend=backend)
    slot, length = cache.open(), TOKENS // PAGE * PAGE - PAGE
    for past in range(0, length, CHUNK):
        feed(cache, slot, past, min(CHUNK, length - past), answers=False)
    mx.clear_cache()
    mx.reset_peak_memory()
    feed(cache, slot, length, 16, answers=True)
    return mx.get_peak_memory() - before


@pytest.mark.long
@pytest.mark.parametrize("backend", [attention_backend, lambda store: PLAIN], ids=["default", "plain"])
def test_a_quantized_past_is_in_16_bits_for_one_layer_at_a_time(backend):
    plain, quantized = peak_of_a_step(KVFormat(), backend), peak_of_a_step(KVFormat(4, 4), backend)
    one_layer = TOKENS * LayerStore.page_bytes(SPECS[0], mx.bfloat16) // PAGE
    assert quantized < plain
    # Codes are widened to float32 on their way, and joined with the open page.
    assert quantized - PagedCache.token_bytes(SPECS, mx.bfloat16, KVFormat(4, 4)) * TOKENS < 5 * one_layer


@pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())
@pytest.mark.parametrize("kv", [KVFormat(), KVFormat(4, 4, first16=True)], ids=lambda kv: kv.name)
def test_what_a_decode_step_allocates_does_not_depend_on_the_context(kv):
    cache = PagedCache(SPECS, dtype=mx.bfloat16, kv_cache_tokens=TOKENS, chunk=CHUNK, kv=kv)
    slot, past, found = cache.open(), 0, []
    for length in (100, 1000, TOKENS - 10):
        while past < length:
            count = min(CHUNK, length - past)
            feed(cache, slot, past, count, answers=False)
            past += count
        mx.clear_cache()
        before = active_memory()
        mx.reset_peak_memory()
        feed(cache, slot, past, 1, answers=True)
        past += 1
        found.append(mx.get_peak_memory() - before)
    # The codes of one layer's past alone are 400 kB. How far the main thread runs ahead of the stream's makes less of a difference.
    assert max(found) - min(found) < 100_000, found


def test_a_page_is_sealed_without_a_copy_of_the_pool():
    """Between two steps nothing else refers to the pools."""
    cache = PagedCache(SPECS, dtype=mx.bfloat16, kv_cache_tokens=TOKENS, chunk=CHUNK, backend=lambda store: PLAIN)
    slot, past, found = cache.open(), 0, []
    for _ in range(TOKENS // CHUNK):
        feed(cache, slot, past, CHUNK - 1, answers=False)
        past += CHUNK - 1
        pools = held(cache)
        rows = mx.random.normal((1, 2, 64)).astype(mx.bfloat16)
        step = cache.begin([Segment(slot, 0, 1, past, TOKENS)])
        for layer in range(LAYERS):
            step.attend(layer, rows, rows, rows, AttentionParams(0.1))
        mx.eval(step.state)
        before = active_memory()
        mx.reset_peak_memory()
        cache.commit(step)
        past += 1
        if held(cache) == pools:
            found.append((mx.get_peak_memory() - before) / pools)
    assert found
    assert max(found) < 1 / LAYERS


def test_growing_a_pool_takes_what_is_planned():
    """Parts of it are there twice."""
    spec, pages = AttentionSpec(4, 64, 64), 300
    stores = [LayerStore(spec, mx.bfloat16) for _ in range(LAYERS)]
    for store in stores:
        store.grow(pages=pages * 2 // 3)
    mx.eval([store.arrays for store in stores])
    mx.clear_cache()
    mx.reset_peak_memory()
    old = active_memory()
    for store in stores:
        store.grow(pages=pages)
    mx.eval([store.arrays for store in stores])
    counted = growth(spec, mx.bfloat16, KVFormat()) * pages * PAGE
    assert 0 < mx.get_peak_memory() - active_memory() <= counted + PAGE
    assert active_memory() > old


def test_a_pool_grows_into_buffers_of_its_own_size(monkeypatch):
    """On a GPU, where MLX would copy a pool in a larger one for each page."""
    cleared = []
    monkeypatch.setattr("mlxinfer.cache.store.is_gpu", lambda: True)
    monkeypatch.setattr("mlxinfer.cache.store.clear_cache", lambda: cleared.append(1))
    store = LayerStore(SPECS[0], mx.bfloat16)
    store.grow(pages=4, slots=1)
    assert cleared == [1]
    store.grow(pages=4, slots=9)
    assert cleared == [1]
    store.grow(pages=6)
    assert cleared == [1, 1]
