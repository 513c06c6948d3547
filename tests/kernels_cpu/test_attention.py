"""Attention over pages against float64, over shapes, dtypes, tables and cuts; and that a row's bits depend on its own past only."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.attention_pages import FORMS, TOLERANCE, Cache, History, Setting, check, rounded
from support.oracles.packed_matrices import DTYPES
from support.processes.examples import examples

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

settings_drawn = st.builds(
    Setting,
    kv_heads=st.integers(1, 3),
    per_kv=st.sampled_from([1, 2, 3, 5, 8]),
    key_dim=st.sampled_from([8, 16, 17, 64, 72, 80]),
    value_dim=st.sampled_from([1, 8, 16, 33, 64, 72]),
    window=st.sampled_from([None, None, 1, 10, 64, 100]),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
    pages=st.sampled_from(list(DTYPES)),
)


@pytest.mark.long
@settings(max_examples=examples(40), deadline=None)
@given(settings_drawn, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), min_size=1, max_size=6), st.sampled_from(FORMS))
def test_like_float64_for_any_setting_and_cut(setting, moves, form):
    length = 260
    histories = [History(setting, length, seed) for seed in range(3)]
    for h in histories[1:]:
        h.sinks = histories[0].sinks
    wanted = [h.expected(setting, 0.3) for h in histories]
    cache, done = Cache(setting, 3, 20), [0, 0, 0]
    for who, count in moves:
        parts = [(i, histories[i], done[i], min(count + 7 * i, length - done[i])) for i in range(3) if i != who]
        parts = [p for p in parts if p[3] > 0]
        if not parts:
            continue
        got, start = cache.step(parts, form=form), 0
        for slot, _, past, n in parts:
            check(got[start : start + n], wanted[slot][past : past + n], setting)
            start += n
            done[slot] += n


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.parametrize(("per_kv", "dim"), [(3, 64), (1, 128), (4, 256), (40, 8), (6, 96)])
def test_long_past_in_one_row_and_in_many(per_kv, dim):
    setting = Setting(1, per_kv, dim, dim)
    history = History(setting, 1300, 4)
    rows = np.union1d(np.arange(0, 1300, 13), np.arange(1196, 1300))
    wanted = history.expected(setting, dim**-0.5, rows)
    cache = Cache(setting, 1, 21)
    for past, count in ((0, 1200), (1200, 2), (1202, 5), (1207, 93)):
        got, these = cache.step([(0, history, past, count)], scale=dim**-0.5), (rows >= past) & (rows < past + count)
        assert these.any()
        check(got[rows[these] - past], wanted[these], setting)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("dim", "turned", "normed"), [(64, 64, False), (64, 0, True), (80, 20, True), (24, 24, True)])
def test_heads_are_normed_and_turned_on_their_way(dim, turned, normed, dtype):
    setting = Setting(2, 3, dim, 16, dtype=dtype, pages=dtype)
    history, plain = History(setting, 150, 5), History(setting, 150, 5)
    rng = np.random.default_rng(8)
    weights = [rounded(rng.standard_normal(dim), dtype) for _ in range(2)] if normed else [None, None]
    frequencies = 100.0 ** -np.linspace(0, 1, turned // 2)
    plain.q, plain.k = (steps(x, w, frequencies) for x, w in zip((history.q, history.k), weights, strict=True))
    wanted, cache = plain.expected(setting, 0.1), Cache(setting, 1, 3)
    for past, count in ((0, 100), (100, 1), (101, 49)):
        rotation = kernels_cpu.rotation([(frequencies.tolist(), past, count)]) if turned else None
        norms = {"query_norm": mx.array(weights[0]), "key_norm": mx.array(weights[1]), "eps": 1e-3} if normed else {}
        for form in FORMS:
            again = Cache(setting, 1, 3) if past == 0 else cache
            got = again.step([(0, history, past, count)], scale=0.1, form=form, rotation=rotation, **norms)
            if past:
                break
            cache = again
        np.testing.assert_allclose(got, wanted[past : past + count], atol=5 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def steps(x: np.ndarray, weight: np.ndarray | None, frequencies: np.ndarray) -> np.ndarray:
    """Norm and rotation in float64."""
    x = x.astype(np.float64)
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * weight
    half = len(frequencies)
    angles = np.arange(len(x))[:, None, None] * frequencies
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    return np.concatenate([*turned, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("parts", [[([], 0, 1)], [([1.0], 0, 0)], [([1.0], 0, 1), ([1.0, 2.0], 0, 1)]])
def test_rotations_that_cannot_be_are_refused(parts):
    with pytest.raises(ValueError, match="Rotation"):
        kernels_cpu.rotation(parts)


@pytest.mark.parametrize("parts", [[], [([1.0], 0, 1)], [([1.0] * 5, 0, 2)]])
def test_rotations_of_other_steps_are_refused(parts):
    cache = Cache(Setting(1, 1, 8, 8), 1, 1)
    history = History(cache.setting, 2, 0)
    with pytest.raises(ValueError, match="rotation"):
        cache.step([(0, history, 0, 2)], rotation=kernels_cpu.rotation(parts))


@pytest.mark.parametrize("setting", [Setting(3, 3, 64, 64), Setting(1, 4, 40, 24, 90, 30.0, True), Setting(2, 1, 64, 64, pages="float16")])
def test_bits_do_not_depend_on_cut_or_neighbours(setting):
    length = 700
    history, other = History(setting, length, 1), History(setting, length, 2)
    other.sinks = history.sinks
    at_once = Cache(setting, 1, 12).step([(0, history, 0, length)])
    for cuts in ([1] * 70 + [63, 1, 66, 500], [256] * 2 + [1] * 188, [100] * 7):
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


def test_bits_do_not_depend_on_the_number_of_threads():
    code = (
        "import hashlib, sys; sys.path.insert(0, 'tests'); from support.oracles.attention_pages import *\n"
        "setting = Setting(3, 3, 64, 64); h = History(setting, 900, 3); c = Cache(setting, 1, 15)\n"
        "outs = [c.step([(0, h, 0, 800)]), c.step([(0, h, 800, 1)]), c.step([(0, h, 801, 40)])]\n"
        "print(hashlib.sha256(b''.join(o.tobytes() for o in outs)).hexdigest())"
    )
    seen = set()
    for threads in ("1", "2", "7"):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"MLXINFER_THREADS": threads}, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def test_nan_and_infinity_reach_those_who_see_them():
    setting = Setting(1, 1, 64, 64)
    clean = History(setting, 100, 0).expected(setting, 0.3)
    for where, value in (("q", np.nan), ("k", np.nan), ("v", np.nan), ("v", np.inf), ("q", np.inf)):
        history = History(setting, 100, 0)
        getattr(history, where)[70, 0, 3] = value
        with np.errstate(invalid="ignore"):
            wanted = history.expected(setting, 0.3)[70:]
        got = Cache(setting, 1, 2).step([(0, history, 0, 100)])
        check(got[:64], clean[:64], setting)
        assert (np.isnan(got[70:]) == np.isnan(wanted)).all()
        assert (np.isposinf(got[70:]) == np.isposinf(wanted)).all()


def test_a_row_of_nothing_but_nan_is_nan():
    setting = Setting(1, 2, 8, 8)
    history = History(setting, 3, 0)
    history.k[:] = np.nan
    assert np.isnan(Cache(setting, 1, 1).step([(0, history, 0, 3)])).all()


def test_large_scores_do_not_overflow():
    setting = Setting(1, 1, 64, 64)
    history = History(setting, 200, 0)
    history.q *= 1e4
    got, wanted = Cache(setting, 1, 3).step([(0, history, 0, 200)]), history.expected(setting, 0.3)
    np.testing.assert_allclose(got, wanted, atol=1e-2)  # scores of 1e5 are rounded to 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 4, 8)}, "rows"),
        ({"q": (3, 3, 8)}, "rows"),
        ({"k": (3, 2, 9)}, "rows"),
        ({"v": (3, 1, 8)}, "rows"),
        ({"q": (3, 33), "k": (3, 16), "v": (3, 16)}, "rows"),
        ({"q": (3, 31), "k": (3, 16), "v": (3, 17)}, "rows"),
        ({"q": (3, 0), "k": (3, 16), "v": (3, 16)}, "rows"),
        ({"open": (1, 2, 63, 8)}, "pages"),
        ({"open": (0, 2, 64, 8)}, "pages"),
        ({"keys": (2, 0, 8, 64)}, "pages"),
        ({"keys": (2, 1, 64, 8)}, "pages"),
        ({"values": (2, 0, 64, 8)}, "pages"),
        ({"dtype": mx.int32}, "pages"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    shapes = {"q": (3, 4, 8), "k": (3, 2, 8), "v": (3, 2, 8), "keys": (2, 1, 8, 64), "values": (2, 1, 64, 8), "open": (1, 2, 64, 8)}
    dtype = change.pop("dtype", mx.float32)
    a = {name: mx.zeros(shape, dtype) for name, shape in (shapes | change).items()}
    plan = kernels_cpu.attention_plan([(0, 0, 3, 64, 0, [0])])
    with pytest.raises(ValueError, match=message):
        kernels_cpu.paged_attention([a["q"], a["k"], a["v"]], [a["keys"], a["values"]], [a["open"]] * 2, plan, scale=1.0)


@pytest.mark.parametrize(
    ("segments", "window"),
    [
        ([(0, 0, 0, 0, 0, [])], None),
        ([(0, 1, 2, 0, 0, [])], None),
        ([(0, 0, 1, 64, 0, [])], None),
        ([(0, 0, 1, 63, 0, [3])], None),
        ([(0, 0, 1, 640, 5, [0] * 5)], None),
        ([(0, 0, 1, 640, 5, [0] * 5)], 400),
        ([(0, 0, 1, 128, 0, [0, -1])], None),
        ([(0, 0, 1, 128, 1, [-1])], 10),
        ([(0, 0, 1, 0, 0, []), (0, 1, 1, 0, 0, [])], None),
        ([(-1, 0, 1, 0, 0, [])], None),
        ([(0, 0, 1, 0, 0, [])], 0),
    ],
)
def test_plans_that_cannot_be_are_refused(segments, window):
    with pytest.raises(ValueError, match="AttentionPlan"):
        kernels_cpu.attention_plan(segments, window)
