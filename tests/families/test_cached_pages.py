"""No cache operation changes a logit: reused prefixes, forks, pages from disk, fewer bits, whole blocks."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.families import LIMIT, Pages, column, error, loaded_model, reference

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import PAGE, AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.step import CacheStep

SAME = 5e-5
"""Two ways to compute the same in float32; a key rounded otherwise in its last bit may get the next code."""


@column("prefix reuse")
def test_a_prefix_is_found_again(name: str) -> None:
    tokens, expected = reference(name)
    pages = Pages(name)
    first = pages.open(tokens)
    pages.read_all(first, tokens, [PAGE, len(tokens) - PAGE])
    pages.cache.release(first)
    again = pages.open(tokens)
    reused = len(pages.known[again])
    assert reused >= PAGE
    assert error(pages.read((again, tokens[reused:]))[0], expected[reused:]) < LIMIT


@column("fork")
def test_a_fork_goes_on_alone(name: str) -> None:
    tokens, expected = reference(name)
    pages = Pages(name)
    one = pages.open()
    pages.read((one, tokens[:70]))
    two = pages.fork(one)
    pages.read((one, tokens[:9]))
    pages.cache.release(one)
    assert error(pages.read((two, tokens[70:]))[0], expected[70:]) < LIMIT


@column("disk")
def test_a_prefix_comes_back_from_disk(name: str, tmp_path: Path) -> None:
    tokens, expected = reference(name)
    before = Pages(name, directory=tmp_path)
    slot = before.open(tokens)
    before.read_all(slot, tokens, [PAGE, len(tokens) - PAGE])
    before.cache.release(slot)
    before.cache.close(60)
    after = Pages(name, directory=tmp_path)
    while after.cache.prefetch(tokens):
        after.cache.wait(10)
    slot = after.open(tokens)
    reused = len(after.known[slot])
    assert reused >= PAGE
    assert error(after.read((slot, tokens[reused:]))[0], expected[reused:]) < LIMIT
    after.cache.close(60)


@pytest.mark.long
@column("cache in 8 and 4 bits")
def test_fewer_bits(name: str) -> None:
    """The same in chunks and at once, and worse with fewer bits; windows that have passed the sealed page see nothing of it."""
    tokens, expected = reference(name)
    pieces = [PAGE, 1, 1, len(tokens) - PAGE - 2]
    losses = []
    for kv in ("8", "4"):
        pages = Pages(name, kv)
        whole = pages.read((pages.open(), tokens))[0]
        chunked = pages.read_all(pages.open(), tokens, pieces)
        np.testing.assert_allclose(chunked, whole, atol=SAME)
        losses.append(np.abs(whole - expected).mean())
    quantizable = any(isinstance(s, AttentionSpec) and KVFormat.can_quantize(s) for s in loaded_model(name).layers)
    assert losses[0] < losses[1] < 0.5 if quantizable else losses[1] < LIMIT


@column("memory plan")
def test_the_cache_takes_what_was_planned(name: str) -> None:
    """Bytes of all arrays of the cache, against those that the plan counts for as many tokens and sequences."""
    pages = Pages(name)
    layers, dtype = pages.model.layers, mx.float32
    tokens = (reference(name)[0] * 3)[: 3 * PAGE]
    pages.read((pages.open(), tokens))
    attention = sum(a.nbytes for store, _ in pages.cache.attention for a in store.arrays)
    room = 4 * PAGE
    planned = PagedCache.token_bytes(layers, dtype) + PagedCache.reuse_bytes(layers, dtype)
    assert attention <= planned * room + PagedCache.sequence_bytes(layers, dtype)
    assert attention >= PagedCache.token_bytes(layers, dtype) * 3 * PAGE


@column("whole blocks on the CPU")
def test_whole_blocks_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch, record_property) -> None:
    if not kernels_cpu.in_use():
        pytest.skip(kernels_cpu.status())
    runs = loaded_model(name).runs
    record_property("cell", _blocks([(run.native is not None, len(run.blocks)) for run in runs]))
    tokens, _ = reference(name)
    chunks = [70, 1, len(tokens) - 71]
    whole = Pages(name)
    found = whole.read_all(whole.open(), tokens, chunks)
    monkeypatch.setattr(CacheStep, "runs_blocks", False)
    single = Pages(name)
    np.testing.assert_allclose(found, single.read_all(single.open(), tokens, chunks), rtol=1e-4, atol=1e-4)


def _blocks(runs: list[tuple[bool, int]]) -> str:
    fused, every = sum(count for native, count in runs if native), sum(count for _, count in runs)
    return "yes" if fused == every else "no" if not fused else "partly"
