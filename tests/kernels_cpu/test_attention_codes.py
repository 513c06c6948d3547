"""Attention over pages of codes against float64, with the quantizer of `cache.sealing`; and that there is one meaning for every cut."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.attention_pages import PAGE, Cache, History, Setting, check
from support.oracles.packed_matrices import DTYPES
from support.processes.examples import examples

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

BITS = [16, 8, 6, 5, 4, 3, 2]
HEADS = [(1, 64), (3, 80), (4, 96), (8, 128), (16, 256), (2, 512)]
"""Query heads for each KV head, and their size."""

settings_drawn = st.builds(
    Setting,
    kv_heads=st.integers(1, 2),
    per_kv=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 16]),
    key_dim=st.sampled_from([8, 24, 64, 72, 80, 96, 128]),
    value_dim=st.sampled_from([8, 16, 24, 64, 80, 96, 104, 128]),
    window=st.sampled_from([None, None, 1, 10, 64, 100]),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
    pages=st.sampled_from(list(DTYPES)),
    k_bits=st.sampled_from(BITS),
    v_bits=st.sampled_from(BITS),
    first16=st.booleans(),
)


@pytest.mark.long
@settings(max_examples=examples(30), deadline=None)
@given(settings_drawn, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), min_size=2, max_size=6))
def test_like_float64_for_any_setting_and_cut(setting, moves):
    length = 260
    histories = [History(setting, length, seed) for seed in range(3)]
    for h in histories[1:]:
        h.sinks = histories[0].sinks
    wanted = [h.expected(setting, 0.1) for h in histories]
    cache, done = Cache(setting, 3, 20), [0, 0, 0]
    for who, count in moves:
        parts = [(i, histories[i], done[i], min(count + 7 * i, length - done[i])) for i in range(3) if i != who]
        parts = [p for p in parts if p[3] > 0]
        if not parts:
            continue
        got, start = cache.step(parts, scale=0.1), 0
        for slot, _, past, n in parts:
            check(got[start : start + n], wanted[slot][past : past + n], setting)
            start += n
            done[slot] += n


@pytest.mark.long
@pytest.mark.parametrize(
    ("per_kv", "dim", "bits"),
    [(*heads, bits) for i, heads in enumerate(HEADS) for j, bits in enumerate(BITS[1:]) if (i + j) % 3 == 0],
)
def test_head_sizes_and_lengths_around_page_ends(per_kv, dim, bits):
    """Each size with two numbers of bits."""
    setting = Setting(1, per_kv, dim, dim, k_bits=bits, v_bits=bits)
    history = History(setting, 302, 7)
    wanted, cache, past = history.expected(setting, dim**-0.5), Cache(setting, 1, 5), 0
    for end in (1, 63, 64, 65, 127, 300, 301, 302):
        got = cache.step([(0, history, past, end - past)], scale=dim**-0.5)
        check(got, wanted[past:end], setting)
        past = end


@pytest.mark.parametrize("pages", list(DTYPES))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", [(64, 64), (24, 80), (7, 104), (128, 8)])
def test_pages_are_sealed_to_the_bits_of_the_reference(dims, bits, pages):
    setting = Setting(2, 1, *dims, dtype=pages, pages=pages, k_bits=bits, v_bits=bits)
    history = History(setting, 3 * PAGE + 5, 1)
    history.k[:, 0] *= 1000
    history.k[:, :, 1] = 1 / 3
    history.k[:, :, 2] = 0
    history.k[:PAGE, :, 3] = -1e-7
    history.v[7] = -2.5
    history.v[8] *= 1e-6
    sealed = setting.seal(*history.pages(setting))
    cache = Cache(setting, 1, 3)
    for past, count in ((0, 70), (70, 1), (71, 125), (196, 1)):
        cache.step([(0, history, past, count)])
    for got, want in zip(cache.sealed, sealed, strict=True):
        got = mx.take(got, mx.array(cache.tables[0]), axis=1)
        assert got.dtype == want.dtype
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("bits", BITS[1:])
def test_a_constant_channel_comes_back_as_it_was(bits):
    setting = Setting(1, 1, 8, 8, dtype="float16", pages="float16", k_bits=bits, v_bits=bits)
    history = History(setting, 66, 0)
    history.k[:], history.v[:] = 1 / 3, 12345
    history.k, history.v = (np.array(mx.array(x).astype(mx.float16).astype(mx.float32)) for x in (history.k, history.v))
    cache = Cache(setting, 1, 1)
    assert (cache.step([(0, history, 0, 65)])[64] == history.v[64]).all()


SETTINGS = [
    Setting(3, 3, 64, 64, k_bits=8, v_bits=4),
    Setting(1, 4, 40, 24, 90, 30.0, True, k_bits=3, v_bits=5),
    Setting(2, 8, 64, 64, pages="float16", k_bits=4, v_bits=16, first16=True),
    Setting(2, 1, 64, 128, pages="bfloat16", k_bits=16, v_bits=6),
    Setting(1, 7, 128, 80, dtype="bfloat16", pages="bfloat16", k_bits=2, v_bits=2, first16=True),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_bits_do_not_depend_on_cut_or_neighbours(setting):
    length = 500
    history, other = History(setting, length, 1), History(setting, length, 2)
    other.sinks = history.sinks
    at_once = Cache(setting, 1, 12).step([(0, history, 0, length)])
    for cuts in ([1] * 70 + [63, 1, 66, 300], [256] + [1] * 188, [100] * 5, [7] * 71):
        cache, past, other_past = Cache(setting, 2, 40, seed=cuts[0]), 0, 0
        for i, count in enumerate(cuts):
            parts = [(0, history, past, count)]
            if i % 3 == 0 and other_past + 30 < length:
                parts.insert(i % 2, (1, other, other_past, 30))
                other_past += 30
            got = cache.step(parts)
            mine = got[30:] if parts[0][0] == 1 else got[:count]
            assert (mine.view(np.int32) == at_once[past : past + count].view(np.int32)).all()
            past += count


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_spoils_its_group_only(where, value):
    setting = Setting(2, 1, 16, 128, k_bits=4, v_bits=4)
    clean, spoilt = History(setting, 2 * PAGE, 3), History(setting, 2 * PAGE, 3)
    getattr(spoilt, where)[70, 1, 5] = value
    caches = [Cache(setting, 1, 2) for _ in range(2)]
    for cache, history in zip(caches, (clean, spoilt), strict=True):
        cache.step([(0, history, 0, 2 * PAGE)])
    for which, (a, b) in enumerate(zip(*(cache.sealed for cache in caches), strict=True)):
        a, b = (np.array(x.view(mx.uint16)) for x in (a, b))
        same = a == b
        page = caches[0].tables[0][1]
        if (where == "k") == (which < 2):
            row = (1, page, 5) if which == 0 else (1, page, slice(None), 5) if which == 1 else (1, page, 6)
            row = (1, page, slice(None), 6, 0) if which == 3 else (1, page, 6, slice(0, 16)) if which == 2 else row
            same[row] = True
        assert same.all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_bits": 7}, "7 bits"),
        ({"v_bits": 1}, "1 bits"),
        ({"v_bits": 32}, "32 bits"),
        ({"k_bits": 8}, "sealed pages"),
        ({"v_bits": 3}, "sealed pages"),
        ({"first": 1}, "first pages"),
        ({"pages": [-4]}, "first pages"),
        ({"pages": [2]}, "sealed pages"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    setting = Setting(1, 1, 32, 32, k_bits=4, v_bits=4, first16=True)
    cache = Cache(setting, 3, 2)
    rows = [mx.zeros((1, 1, 32))] * 3
    plan = kernels_cpu.attention_plan([(0, 0, 1, PAGE, 0, change.pop("pages", [0]))])
    first = cache.first[: change.pop("first", 2)]
    with pytest.raises(ValueError, match=message):
        kernels_cpu.paged_attention(rows, cache.sealed, cache.open, plan, scale=1.0, first=first, **{"k_bits": 4, "v_bits": 4} | change)


def test_values_that_have_no_groups_are_refused():
    sealed, open = [mx.zeros((1, 0, 8, 64)), mx.zeros((1, 0, 64, 1), mx.uint32)], [mx.zeros((1, 1, 64, d)) for d in (8, 12)]
    rows, plan = [mx.zeros((1, 1, 8)), mx.zeros((1, 1, 8)), mx.zeros((1, 1, 12))], kernels_cpu.attention_plan([(0, 0, 1, 0, 0, [])])
    with pytest.raises(ValueError, match="12 channels"):
        kernels_cpu.paged_attention(rows, sealed, open, plan, scale=1.0, v_bits=4)
