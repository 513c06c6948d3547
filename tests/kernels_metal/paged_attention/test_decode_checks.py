"""Decode attention under sanitizers and in every order of threads, and the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from _pytest.mark import ParameterSet

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.paged_attention.tiles import row_class
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.decode_scenes import Scene
from tests.support.oracles.sealed_pages import to_float

pytestmark = needs_emulator

# Every way through the kernel: pages of one simdgroup and shared ones; whole and cut sequences; runs of whole words and of single
# bytes; all kinds of pages; queries copied and not.
SCENES = {
    "own pages": Scene(
        ((1, 301), (3, 67), (2, 200)), k_bits=8, v_bits=3, dim=64, heads=2, dtype=mx.bfloat16, sinks=True, softcap=5.0, apart=5
    ),
    "narrow runs": Scene(((2, 300), (1, 65)), k_bits=3, v_bits=2, dim=96, value_dim=80, heads=4, dtype=mx.float16, first=True),
    "cut, long runs": Scene(((1, 1200),), k_bits=4, v_bits=16, dim=80, heads=1, kv_heads=1, cores=100, dtype=mx.float32, sinks=True),
    "shared, cut": Scene(((1, 900), (2, 66)), k_bits=4, v_bits=4, dim=128, heads=8, kv_heads=1, cores=100, dtype=mx.bfloat16, apart=3),
    "shared, 16 bits, window": Scene(((3, 301), (1, 1)), k_bits=16, v_bits=16, dim=64, heads=3, dtype=mx.float16, window=100),
    "shared, in parts": Scene(((1, 131),), k_bits=5, v_bits=6, dim=256, heads=12, kv_heads=1, dtype=mx.float32, first=True, apart=16),
    "128 queries": Scene(((8, 200), (1, 64)), k_bits=6, v_bits=5, dim=80, heads=16, kv_heads=1, dtype=mx.float16),
}


@cache
def answer(name: str) -> np.ndarray:
    with emulated():
        return to_float(SCENES[name].run())


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("order", "seed"), [("reversed", 0), ("random", 1), ("random", 2)])
def test_the_order_of_threads_changes_no_bit(name: str, order: str, seed: int) -> None:
    with emulated(order=order, seed=seed):
        assert np.array_equal(to_float(SCENES[name].run()), answer(name))


def sanitized() -> Iterator[ParameterSet]:
    """Search for races with shared pages, and for unset memory with divided sequences or short runs of bytes."""
    sampled = {
        "tsan": ("own pages", "shared, cut", "128 queries"),
        "msan": ("narrow runs", "cut, long runs", "shared, in parts"),
    }
    for mode in ("asan", *sampled):
        for name in SCENES:
            marks = () if mode == "asan" else pytest.mark.long if name in sampled[mode] else pytest.mark.slow
            yield pytest.param(mode, name, marks=marks)


@pytest.mark.parametrize(("mode", "name"), sanitized())
def test_sanitizers_are_silent(mode: str, name: str) -> None:
    with emulated(mode=mode, order="random", seed=3):
        assert np.array_equal(to_float(SCENES[name].run()), answer(name))


@pytest.mark.parametrize("name", SCENES)
def test_every_byte_of_the_cache_is_loaded_once(name: str) -> None:
    """Pages are read once for all heads and rows, or once per work item if 8 simdgroups cannot process all rows."""
    s = SCENES[name]
    with emulated(), emulator.count_bytes() as counts:
        s.run()
    decode = counts.of("paged_attention_decode")
    once = row_class(s.shape, max(r.count for r in s.rows))
    pieces = [-(-r.count // once) for r in s.rows]
    assert max(pieces) == (4 if name == "128 queries" else 1)
    kinds = ("sealed", "first", "open", "recent")
    for buffer in (*(f"{kind}_{what}" for kind in kinds for what in ("keys", "values")), "key_scales", "value_scales"):
        assert decode[buffer].most_loads <= max(pieces), buffer
    seen = sum((r.past + min(i + once, r.count) - 1) % 64 + 1 for r in s.rows for i in range(0, r.count, once))
    assert decode["open_keys"].loaded + decode["recent_keys"].loaded == seen * s.kv_heads * s.dim * s.dtype.size
    pages = sum(item[6] - item[5] for item in np.array(s.plan.work)[: 11 * s.plan.items].reshape(-1, 11))
    sealed = pages - sum(times * (1 + sum(p < 0 for p in r.pages)) for r, times in zip(s.rows, pieces, strict=True))
    heads, bits = s.kv_heads, s.shape
    element = 8 * s.dtype.size
    assert decode["sealed_keys"].loaded == sealed * heads * 64 * s.dim * (element if bits.k_bits == 16 else bits.k_bits) // 8
    if s.shape.value_dim * s.v_bits % 32 == 0:
        assert decode["sealed_values"].loaded == sealed * heads * 64 * bits.value_dim * (element if bits.v_bits == 16 else bits.v_bits) // 8
    assert counts.total().stored == stored(s)


def stored(s: Scene) -> int:
    """Only answers are written, or parts of answers with their sums, but no scores. Unused outputs have one element; so have recent keys
    and values, because rows are ready here."""
    rows, values, size = s.query_rows * s.shape.heads, s.shape.value_dim, s.dtype.size
    whole = 2 * size + rows * values * size
    return whole + size + (0 if s.plan.parts is None else s.plan.part_rows * s.shape.heads * (values * size + 4))


def traffic(bits: int) -> int:
    """Of one KV head of Llama 3's shape after 4K tokens, parts of answers included, cut as on a chip with a core for each of its heads."""
    s = Scene(((1, 4097),), k_bits=bits, v_bits=bits, dim=128, heads=4, kv_heads=1, dtype=mx.bfloat16, cores=1)
    with emulated(), emulator.count_bytes() as counts:
        s.run()
    total = counts.total()
    return total.fetched + total.stored


@pytest.mark.long
def test_four_bits_are_less_than_a_third_of_the_traffic() -> None:
    plain = traffic(16)
    assert traffic(4) <= 0.30 * plain
    assert traffic(8) <= 0.55 * plain
