"""The quantizer of pages, against NumPy and against what it promises."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.oracles import sealed, sealed_pages
from support.processes.examples import examples

from mlxinfer.cache.base import PAGE, AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.kv_quantization import page_arrays, seal_keys, seal_values, unseal_keys, unseal_values
from mlxinfer.kernels_metal.formats import BITS, v_group

QUANTIZED = BITS[1:]
DIMS = (8, 24, 40, 64, 72, 80, 96, 128, 192, 256)


def draw(seed: int, dim: int, kind: str) -> np.ndarray:
    """Keys or values `[2, 2, 64, dim]` of a kind that occurs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, PAGE, dim))
    if kind == "biased channels":
        x = x * rng.uniform(0.01, 3, dim) + rng.choice([0, 0, 0, 40, -300], dim)
    elif kind == "outliers":
        x[rng.random(x.shape) < 0.01] *= 1000
    elif kind == "tiny":
        x *= 1e-6
    elif kind == "huge":
        x *= 1e37
    elif kind == "constant channels":
        x[..., rng.random(dim) < 0.5] = 0.3
    return x.astype(np.float32)


KINDS = ("normal", "biased channels", "outliers", "tiny", "huge", "constant channels")


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1000), st.sampled_from(DIMS), st.sampled_from(KINDS), st.sampled_from(QUANTIZED))
def test_codes_and_scales_are_those_of_numpy(seed, dim, kind, bits):
    x = draw(seed, dim, kind)
    for got, groups, rows, inset in (
        (seal_keys(mx.array(x), bits), x.swapaxes(-1, -2), (dim, PAGE), 0.0),
        (seal_values(mx.array(x), bits), x.reshape(2, 2, PAGE, -1, v_group(dim)), (PAGE, dim), sealed_pages.value_inset(bits)),
    ):
        codes, scale, bias = sealed_pages.quantize(groups, bits, inset)
        np.testing.assert_array_equal(np.array(got[0]), sealed_pages.pack(codes.reshape(2, 2, *rows), bits))
        np.testing.assert_array_equal(np.array(got[1]), np.stack([scale, bias], axis=2))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1000), st.sampled_from(DIMS), st.sampled_from(KINDS), st.sampled_from(QUANTIZED))
def test_what_is_restored_is_that_of_numpy_and_near(seed, dim, kind, bits):
    x = draw(seed, dim, kind)
    keys = np.array(unseal_keys(seal_keys(mx.array(x), bits), bits, mx.float32))
    values = np.array(unseal_values(seal_values(mx.array(x), bits), bits, dim, mx.float32))
    np.testing.assert_allclose(keys, sealed.restored_keys(x, bits), rtol=1e-6)
    np.testing.assert_allclose(values, sealed.restored_values(x, bits), rtol=1e-6)
    if kind != "huge":
        spread = x.max(axis=2, keepdims=True) - x.min(axis=2, keepdims=True)
        # Half a step, which rounding to float16 makes a little larger.
        assert (np.abs(keys - x) <= spread / (2**bits - 1) * 0.51 + np.abs(x).max(axis=2, keepdims=True) / 1024 + 2**-24).all()


@pytest.mark.parametrize("bits", QUANTIZED)
@pytest.mark.parametrize("dim", [32, 64, 96])
def test_the_stream_of_codes_is_that_of_mlx(bits, dim):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, dim)).astype(np.float32)
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    theirs, scales, biases = mx.quantize(mx.array(codes), group_size=32, bits=bits)
    read = mx.dequantize(mx.array(sealed_pages.pack(codes.astype(np.uint32), bits)), mx.ones_like(scales), mx.zeros_like(biases), 32, bits)
    np.testing.assert_array_equal(np.array(read), codes)
    assert theirs.shape == (3, dim * bits // 32)


@settings(max_examples=examples(200), deadline=None)
@given(st.floats(width=16, allow_nan=False, allow_infinity=False), st.sampled_from([mx.float16, mx.bfloat16]), st.sampled_from(QUANTIZED))
@example(0.0, mx.bfloat16, 2)
@example(-0.0, mx.float16, 8)
@example(65504.0, mx.float16, 3)
@example(-65504.0, mx.float16, 4)
@example(2.0**-24, mx.float16, 4)
def test_a_constant_comes_back_exactly(value, dtype, bits):
    # As bfloat16 and then a float16 at most in size; below the smallest normal float16, bfloat16 has values that float16 lacks.
    x = mx.full((1, 1, PAGE, 8), value, mx.float32).astype(dtype)
    exact = x.astype(mx.float16).astype(dtype)
    if not mx.array_equal(exact, x).item():
        return
    for back in (unseal_keys(seal_keys(x, bits), bits, dtype), unseal_values(seal_values(x, bits), bits, 8, dtype)):
        assert mx.array_equal(back, x).item()


@pytest.mark.parametrize("bits", QUANTIZED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_spoils_its_group_alone(bits, bad):
    x = draw(3, 80, "normal")
    clean = [
        unseal_keys(seal_keys(mx.array(x), bits), bits, mx.float32),
        unseal_values(seal_values(mx.array(x), bits), bits, 80, mx.float32),
    ]
    x[0, 1, 5, 50] = bad
    keys, values = (
        np.array(a)
        for a in (
            unseal_keys(seal_keys(mx.array(x), bits), bits, mx.float32),
            unseal_values(seal_values(mx.array(x), bits), bits, 80, mx.float32),
        )
    )
    channel, group = np.zeros(x.shape, bool), np.zeros(x.shape, bool)
    channel[0, 1, :, 50] = True
    group[0, 1, 5, 40:80] = True
    np.testing.assert_array_equal(keys[~channel], np.array(clean[0])[~channel])
    np.testing.assert_array_equal(values[~group], np.array(clean[1])[~group])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=PAGE, max_size=PAGE), st.sampled_from(QUANTIZED))
def test_finite_numbers_never_give_nan(numbers, bits):
    x = mx.array(np.array(numbers, np.float32).reshape(1, 1, PAGE, 1).repeat(8, axis=-1))
    assert np.isfinite(np.array(unseal_keys(seal_keys(x, bits), bits, mx.float32))).all()
    assert np.isfinite(np.array(unseal_values(seal_values(x, bits), bits, 8, mx.float32))).all()


@pytest.mark.parametrize("keys", BITS)
@pytest.mark.parametrize(("dims", "values"), [((64, 64), 4), ((80, 96), 3), ((192, 128), 5), ((8, 40), 16)])
def test_arrays_are_as_large_as_they_are_said_to_be(keys, values, dims):
    spec, form = AttentionSpec(3, *dims), KVFormat(keys, values)
    for count in (0, 2):
        k, v = (mx.zeros((3, count, PAGE, dim), mx.bfloat16) for dim in dims)
        made = seal_keys(k, keys) + seal_values(v, values)
        assert [(a.shape[2:], a.dtype) for a in made] == page_arrays(spec, form, mx.bfloat16)
        assert all(a.shape[:2] == (3, count) for a in made)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_restoring_rounds_once_to_the_dtype_of_computing(dtype):
    x = mx.array(draw(1, 64, "biased channels")).astype(dtype)
    arrays = seal_keys(x, 4)
    assert mx.array_equal(unseal_keys(arrays, 4, dtype), unseal_keys(arrays, 4, mx.float32).astype(dtype)).item()
