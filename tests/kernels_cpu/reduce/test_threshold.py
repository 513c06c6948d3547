"""The cut of top-k and top-p against a sorted row in float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())


def kept(row, top_k, top_p, slack=0.0):
    """The lowest logit that stays."""
    ordered = np.sort(row.astype(np.float64))[::-1][: max(top_k, 1)]
    weights = np.exp(ordered - ordered[0])
    before = np.cumsum(weights) / weights.sum() - weights / weights.sum()
    stays = (before < top_p + slack) | (top_p >= 1)
    stays[0] = True
    return np.float32(ordered[stays][-1])


@given(
    st.sampled_from([1, 2, 17, 64, 8192, 8193, 30000]),
    st.sampled_from([0.01, 1.0, 5.0, 300.0]),
    st.sampled_from([1, 2, 40, 1000, 10**6]),
    st.sampled_from([0.0, 0.1, 0.5, 0.95, 0.9999]),
    st.integers(0, 2**31),
)
def test_like_sorting(size, spread, top_k, top_p, seed):
    rows = (np.random.default_rng(seed).standard_normal((2, size)) * spread).astype(np.float32)
    found = np.array(kernels_cpu.threshold(mx.array(rows), mx.array([top_k, top_k]), mx.array([top_p, 1.0])))
    # The sum of thousands of weights is rounded, so the cut may come a few tokens sooner or later.
    lowest, highest = kept(rows[0], top_k, top_p, 1e-5), kept(rows[0], top_k, top_p, -1e-5)
    assert found[0] in rows[0]
    assert lowest <= found[0] <= highest
    assert found[1] == (-np.inf if top_k >= size else kept(rows[1], top_k, 1.0))


def test_forbidden_tokens_and_nan():
    row = mx.array([[-np.inf, 1.0, 2.0, -np.inf]] * 2 + [[np.nan, 1.0, 2.0, 0.0], [-np.inf] * 4])
    found = kernels_cpu.threshold(row, mx.array([3, 9, 2, 2]), mx.array([1.0, 0.9, 1.0, 0.5]))
    assert np.array(found).tolist() == [-np.inf, 1.0, 1.0, -np.inf]


def test_no_rows_and_wrong_shapes():
    assert kernels_cpu.threshold(mx.zeros((0, 5)), mx.zeros((0,), mx.int32), mx.zeros((0,))).shape == (0,)
    for logits, settings in ((mx.zeros((2, 0)), 2), (mx.zeros((2,)), 2), (mx.zeros((2, 5), mx.float16), 2), (mx.zeros((2, 5)), 3)):
        with pytest.raises(ValueError, match=r"\[threshold\]"):
            kernels_cpu.threshold(logits, mx.ones((settings,), mx.int32), mx.ones((settings,)))
