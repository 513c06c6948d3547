"""`argmax` against numpy's."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())


@given(st.integers(0, 5), st.sampled_from([1, 2, 15, 16, 63, 65, 8191, 8192, 8193, 30000]), st.integers(0, 2**31))
def test_like_numpy(rows, size, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-40, 40, (rows, size)).astype(np.float32)  # with many ties: the first one counts
    found = kernels_cpu.argmax(mx.array(x))
    assert found.dtype == mx.uint32
    assert np.array(found).tolist() == x.argmax(-1).tolist()


def test_strided_rows_and_more_axes():
    x = np.random.default_rng(0).standard_normal((3, 4, 50)).astype(np.float32)
    assert np.array_equal(np.array(kernels_cpu.argmax(mx.array(x))), x.argmax(-1))
    assert np.array_equal(np.array(kernels_cpu.argmax(mx.array(x)[:, ::2, 10:])), x[:, ::2, 10:].argmax(-1))
    assert np.array_equal(np.array(kernels_cpu.argmax(mx.array(x).swapaxes(1, 2))), x.swapaxes(1, 2).argmax(-1))


def test_infinities_and_nan():
    rows = mx.array([[-np.inf, -np.inf], [np.nan, 3], [3, np.inf], [np.nan, np.nan], [-np.inf, -5]])
    assert np.array(kernels_cpu.argmax(rows)).tolist() == [0, 1, 1, 0, 1]


def test_what_has_no_highest_is_refused():
    for x in (mx.zeros((3, 0)), mx.array(1.0), mx.zeros((2, 2), mx.int32)):
        with pytest.raises(ValueError, match=r"\[argmax\]"):
            kernels_cpu.argmax(x)
