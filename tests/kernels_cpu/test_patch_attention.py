"""Attention of all rows to all rows against float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.packed_matrices import DTYPES, UNIT, random, to_numpy
from support.processes.examples import examples

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.can_compute_towers(), reason=f"no such operation: {kernels_cpu.status()}")


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, parts: int) -> np.ndarray:
    """Heads `[batch, rows, heads, dim]`, tables `[batch or 1, rows, dim]`."""
    cut = x.reshape(*x.shape[:-1], parts, 2, -1)
    other = np.stack([-cut[..., 1, :], cut[..., 0, :]], axis=-2).reshape(x.shape)
    return x * cos[:, :, None] + other * sin[:, :, None]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bnhd,bmhd->bhnm", q, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhnm,bmhd->bnhd", weights, v).reshape(q.shape[0] * q.shape[1], -1)


def assert_near(got: mx.array, want: np.ndarray, dtype: str) -> None:
    assert got.dtype == DTYPES[dtype]
    np.testing.assert_allclose(to_numpy(got), want, rtol=2 * UNIT[dtype] + 4e-6, atol=3e-6)


@settings(max_examples=examples(100), deadline=None)
@given(
    batch=st.integers(1, 3),
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 129, 257, 300])),
    kv=st.integers(1, 3),
    group=st.integers(1, 2),
    dim=st.sampled_from([4, 8, 20, 64, 72, 80, 96, 128]),
    dtype=st.sampled_from(list(DTYPES)),
    joined=st.booleans(),
    turning=st.sampled_from([None, "alike", "apart"]),
    parts=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_like_float64(batch, rows, kv, group, dim, dtype, joined, turning, parts, seed):
    rng = np.random.default_rng(seed)
    heads, scale = kv * group, dim**-0.5
    if joined:
        parts_of = mx.split(random(rng, (batch * rows, (heads + 2 * kv) * dim), dtype), [heads * dim, (heads + kv) * dim], axis=1)
        q, k, v = (x.reshape(batch, rows, -1, dim) for x in parts_of)
    else:
        q, k, v = (random(rng, (batch, rows, count, dim), dtype) for count in (heads, kv, kv))
    turns, wide = None, [to_numpy(x) for x in (q, k, v)]
    if turning:
        angles = rng.uniform(-9, 9, (batch if turning == "apart" else 1, rows, dim)).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        turns = (mx.array(cos.reshape(-1, dim)), mx.array(sin.reshape(-1, dim)))
        wide[:2] = [rotated(x, cos.astype(np.float64), sin.astype(np.float64), parts) for x in wide[:2]]
    assert_near(kernels_cpu.patch_attention(q, k, v, scale, turns, parts), expected(*wide, scale), dtype)


def test_more_keys_than_fit_at_once():
    """One head after the other has its keys and values in float32 memory."""
    rng = np.random.default_rng(0)
    q, k, v = (random(rng, (40, 700, 2, 64), "float32") for _ in range(3))
    got = to_numpy(kernels_cpu.patch_attention(q, k, v, 0.125)).reshape(40, 700, 128)
    for image in (0, 17, 39):
        want = expected(*(to_numpy(x[image : image + 1]) for x in (q, k, v)), 0.125)
        np.testing.assert_allclose(got[image], want, rtol=4e-6, atol=3e-6)


def test_large_scores():
    """Their own rounding, by 2^-24 of thousands, is what remains."""
    rng = np.random.default_rng(1)
    q, k, v = (random(rng, (1, 200, 1, 64), "float32") for _ in range(3))
    got = kernels_cpu.patch_attention(q, k, v, 300.0)
    np.testing.assert_allclose(to_numpy(got), expected(*map(to_numpy, (q, k, v)), 300.0), atol=4e-3)


def test_nan_reaches_the_rows_that_see_it():
    x = np.random.default_rng(2).standard_normal((2, 50, 2, 8)).astype(np.float32)
    bad = x.copy()
    bad[0, 3, 1, 2] = np.nan
    q, k, v = mx.array(x), mx.array(bad), mx.array(x)
    found = np.isnan(np.array(kernels_cpu.patch_attention(q, k, v, 0.3))).reshape(2, 50, 2, 8)
    assert found[0, :, 1].all()
    assert not found[0, :, 0].any()
    assert not found[1].any()


@pytest.mark.parametrize(("batch", "rows"), [(0, 5), (2, 0)])
def test_nothing_gives_nothing(batch, rows):
    x = mx.zeros((batch, rows, 2, 8))
    assert kernels_cpu.patch_attention(x, x, x, 1.0).shape == (0, 16)


_ROWS = mx.zeros((2, 5, 4, 8))


@pytest.mark.parametrize(
    ("keys", "values", "turns", "parts"),
    [
        (_ROWS.astype(mx.float16), _ROWS, None, 1),
        (_ROWS[:, :4], _ROWS[:, :4], None, 1),
        (_ROWS[:, :, :3], _ROWS[:, :, :3], None, 1),
        (_ROWS, _ROWS[..., :4], None, 1),
        (_ROWS[0], _ROWS[0], None, 1),
        (_ROWS, _ROWS, (mx.zeros((5, 4)), mx.zeros((5, 4))), 1),
        (_ROWS, _ROWS, (mx.zeros((6, 8)), mx.zeros((6, 8))), 1),
        (_ROWS, _ROWS, (mx.zeros((5, 8)), mx.zeros((5, 8))), 3),
        (_ROWS, _ROWS, (mx.zeros((5, 8)), mx.zeros((10, 8))), 1),
    ],
)
def test_wrong_arguments_are_refused(keys, values, turns, parts):
    with pytest.raises(ValueError, match="patch_attention"):
        kernels_cpu.patch_attention(_ROWS, keys, values, 1.0, turns, parts)
