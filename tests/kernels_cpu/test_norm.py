"""The native root-mean-square norm against float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

DTYPES = {mx.float32: 2e-6, mx.bfloat16: 1e-2, mx.float16: 2e-3}


@settings(max_examples=examples(80), deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=2).map(tuple),
    size=st.one_of(st.integers(1, 70), st.sampled_from([576, 2048, 16385])),
    dtype=st.sampled_from(list(DTYPES)),
    weighted=st.booleans(),
    added=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_like_float64(shape, size, dtype, weighted, added, strided, seed):
    rng = np.random.default_rng(seed)
    draw = lambda *s: mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype)  # noqa: E731
    x = draw(*shape, 2 * size)[..., :size] if strided else draw(*shape, size)
    weight = draw(size) if weighted else None
    onto = draw(*shape, size) if added else None
    a, w, b = (np.array(v.astype(mx.float32)).astype(np.float64) if v is not None else None for v in (x, weight, onto))
    want = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-3) * (1 if w is None else w) + (0 if b is None else b)
    got = kernels_cpu.rms_norm(x, weight, 1e-3, onto)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, atol=4 * DTYPES[dtype], rtol=4 * DTYPES[dtype])


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", [1, 7, 16, 50, 576])
def test_norms_that_subtract_the_mean(size, dtype):
    rng = np.random.default_rng(size)
    x, weight = (mx.array(rng.standard_normal(shape).astype(np.float32) + 3).astype(dtype) for shape in ((5, size), (size,)))
    program = kernels_cpu.Program(size, dtype)
    program.norm(program.stream, (weight, 1e-3), to=program.stream, onto=program.stream, centring=True)
    got = kernels_cpu.run_blocks(x, program.finish(), [], [], [], []).rows
    a, w = (np.array(v.astype(mx.float32), np.float64) for v in (x, weight))
    want = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-3) * w + a
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, atol=8 * DTYPES[dtype], rtol=8 * DTYPES[dtype])


@pytest.mark.skipif(not kernels_cpu.can_compute_towers(), reason=f"no such operation: {kernels_cpu.status()}")
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", [1, 7, 16, 50, 576, 1152])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_with_a_bias(size, dtype, biased):
    rng = np.random.default_rng(size)
    x, weight, bias = (mx.array(rng.standard_normal(s).astype(np.float32) + 3).astype(dtype) for s in ((2, 9, size), (size,), (size,)))
    got = kernels_cpu.layer_norm(x, weight, bias if biased else None, 1e-3)
    a, w, b = (np.array(v.astype(mx.float32), np.float64) for v in (x, weight, bias))
    want = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-3) * w + (b if biased else 0)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, atol=8 * DTYPES[dtype], rtol=8 * DTYPES[dtype])


def test_many_rows_on_all_threads():
    x = mx.array(np.random.default_rng(0).standard_normal((700, 100)).astype(np.float32))
    assert mx.allclose(kernels_cpu.rms_norm(x, None, 0.0), mx.fast.rms_norm(x, None, 0.0), atol=1e-5)


def test_nan_and_infinity_as_in_mlx():
    for value in (float("nan"), float("inf")):
        x = mx.ones((3, 40))
        x[1, 7] = value
        got, want = np.array(kernels_cpu.rms_norm(x, None, 1e-6)), np.array(mx.fast.rms_norm(x, None, 1e-6))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got[[0, 2]], want[[0, 2]], rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "weight", "onto", "message"),
    [
        (mx.zeros(()), None, None, "floats"),
        (mx.zeros((2, 3), mx.int32), None, None, "floats"),
        (mx.zeros((2, 3)), mx.zeros((2,)), None, "columns"),
        (mx.zeros((2, 3)), None, mx.zeros((3,)), "onto"),
        (mx.zeros((2, 3)), None, mx.zeros((2, 3), mx.float16), "onto"),
    ],
)
def test_wrong_arguments_are_refused(x, weight, onto, message):
    with pytest.raises(ValueError, match=message):
        kernels_cpu.rms_norm(x, weight, 1e-6, onto)
