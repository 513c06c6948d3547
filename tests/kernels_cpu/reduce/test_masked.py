"""`masked` against numpy's own unpacking of bits."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.can_mask(), reason=f"no such operation: {kernels_cpu.status()}")


def expected(x, words):
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : x.shape[1]].astype(bool)
    return np.where(bits, x, np.float32(-np.inf))


@given(
    st.integers(0, 4),
    st.sampled_from([1, 31, 32, 33, 96, 8191, 8192, 8193, 30001]),
    st.sampled_from([0, 0.02, 0.5, 1]),
    st.integers(0, 2**31),
)
def test_like_numpy(rows, size, share, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size)).astype(np.float32)
    words = np.packbits(rng.random((rows, (size + 31) // 32 * 32)) < share, axis=1, bitorder="little").view(np.uint32)
    assert np.array_equal(np.array(kernels_cpu.masked(mx.array(x), mx.array(words))), expected(x, words))


def test_strided_rows():
    x = np.random.default_rng(0).standard_normal((6, 80)).astype(np.float32)
    words = np.random.default_rng(1).integers(0, 2**32, (6, 5), dtype=np.uint64).astype(np.uint32)
    found = kernels_cpu.masked(mx.array(x)[::2, 16:], mx.array(words)[1::2, :2])
    assert np.array_equal(np.array(found), expected(x[::2, 16:], np.ascontiguousarray(words[1::2, :2])))


def test_infinities_and_nan_stay():
    x = mx.array([[np.inf, -np.inf, np.nan, 1.0]])
    assert np.array_equal(np.array(kernels_cpu.masked(x, mx.array([[7]], mx.uint32))), [[np.inf, -np.inf, np.nan, -np.inf]], equal_nan=True)


def test_wrong_shapes_and_types_are_refused():
    for x, words in (((2, 33), (2, 1)), ((2, 33), (1, 2)), ((33,), (2,))):
        with pytest.raises(ValueError, match=r"\[masked\]"):
            kernels_cpu.masked(mx.zeros(x), mx.zeros(words, mx.uint32))
    with pytest.raises(ValueError, match=r"\[masked\]"):
        kernels_cpu.masked(mx.zeros((1, 32)), mx.zeros((1, 1), mx.int32))
