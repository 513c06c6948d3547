"""Scales and codes fitted to the inputs of a matrix."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer import kernels_cpu
from mlxinfer.convert.encode import affine as encoders
from mlxinfer.convert.encode.affine import check_encoder, fit, pack_codes
from mlxinfer.convert.encode.quantizer import Quantizer
from mlxinfer.convert.plan.weight_map import OutputTensor
from mlxinfer.errors import ConversionError
from mlxinfer.loading.weights import TensorRequest, quantize
from mlxinfer.nn.weights import Dense, Format, Quantized

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
no_kernels = pytest.mark.skipif(not kernels_cpu.in_use(), reason=f"CPU kernels: {kernels_cpu.status()}")
WAYS = [pytest.param(encoders._mlx_fit, id="mlx"), pytest.param(encoders._native_fit, id="kernels", marks=no_kernels)]


def loss(weight: mx.array, found: Quantized, importance: mx.array) -> float:
    """Return the weighted squared error in float64."""
    difference = np.array(found.dequantize(mx.float32), np.float64) - np.array(weight.astype(mx.float32), np.float64)
    return float((np.array(importance, np.float64) * difference**2).sum())


def matrix(seed: int, rows: int, columns: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    weight = mx.array(rng.standard_t(4, (rows, columns)).astype(np.float32) / 30).astype(dtype)
    return weight, mx.array((rng.random(columns) ** 6 + 1e-3).astype(np.float32))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_less_is_lost_than_by_rounding_in_the_range(monkeypatch, way, bits, group_size):
    monkeypatch.setattr(encoders, "_native_fit" if kernels_cpu.in_use() else "_mlx_fit", way)
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        weight, importance = matrix(bits, 5, 384, dtype)
        form = Format(bits, group_size)
        found, plain = fit(weight, form, importance), quantize(weight, form)
        assert found.scales.dtype == found.biases.dtype == dtype
        assert loss(weight, found, importance) < (0.85 if bits < 8 else 0.98) * loss(weight, plain, importance)
        assert found.weight.dtype == mx.uint32
        assert found.shape == weight.shape


@pytest.mark.parametrize("way", WAYS)
def test_scales_are_the_best_for_their_codes(way):
    """Compares with the float64 solution of each group's normal equations."""
    weight, importance = matrix(1, 7, 256, mx.float32)
    codes, scales, biases = (np.array(part, np.float64) for part in way(weight, Format(4, 64), importance[None]))
    x, w, q = (np.array(part, np.float64).reshape(-1, 64) for part in (weight, mx.broadcast_to(importance, weight.shape), codes))
    found = (w * (q * scales.reshape(-1, 1) + biases.reshape(-1, 1) - x) ** 2).sum(-1)
    for group in range(len(x)):
        root = np.sqrt(w[group])[:, None]
        columns = np.stack([q[group], np.ones(64)], -1)
        best, *_ = np.linalg.lstsq(root * columns, root[:, 0] * x[group], rcond=None)
        assert found[group] <= (w[group] * (columns @ best - x[group]) ** 2).sum() * 1.1 + 1e-12


@no_kernels
def test_both_ways_find_as_good_a_fit():
    for seed, (bits, group_size) in enumerate([(2, 32), (3, 64), (4, 64), (6, 128), (8, 32)]):
        weight, importance = matrix(seed, 33, 640 if group_size < 128 else 512, mx.bfloat16)
        form = Format(bits, group_size)
        found = (way(weight, form, importance[None]) for way in (encoders._mlx_fit, encoders._native_fit))
        results = [Quantized(pack_codes(codes, bits), scales, biases, form) for codes, scales, biases in found]
        first, second = (loss(weight, each, importance) for each in results)
        assert first == pytest.approx(second, rel=0.03)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_groups_without_range(way, dtype):
    """Groups of equal numbers, zeros, numbers too small for the dtype, and a lone outlier give finite and nearly exact results."""
    rows = np.zeros((5, 64), np.float32)
    rows[1], rows[2], rows[3, 7], rows[4] = 0.25, -1e-6, 100, np.linspace(-1e-7, 1e-7, 64)
    weight = mx.array(rows).astype(dtype)
    codes, scales, biases = way(weight, Format(4, 64), mx.ones((1, 64)))
    found = Quantized(pack_codes(codes, 4), scales, biases, Format(4, 64)).dequantize(mx.float32)
    assert np.isfinite(np.array(scales.astype(mx.float32))).all()
    np.testing.assert_allclose(np.array(found), np.array(weight.astype(mx.float32)), rtol=0.01, atol=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_each_row_may_have_an_importance_of_its_own(way):
    weight, importance = matrix(3, 6, 128, mx.float32)
    rows = mx.stack([importance, importance[::-1]] * 3)
    together = way(weight, Format(3, 32), rows)
    for row in range(6):
        alone = way(weight[row : row + 1], Format(3, 32), rows[row : row + 1])
        assert all(mx.array_equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


@given(st.sampled_from(BITS), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_codes_are_packed_as_mlx_reads_them(bits, rows, blocks, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, 32 * blocks)).astype(np.uint8)
    ones, zeros = mx.ones((rows, blocks)), mx.zeros((rows, blocks))
    read = mx.dequantize(pack_codes(mx.array(codes), bits), ones, zeros, 32, bits)
    assert np.array_equal(np.array(read), codes)


def test_names():
    assert check_encoder(None) == check_encoder("fit") == "fit"
    assert check_encoder("minmax") == "minmax"
    with pytest.raises(ConversionError, match=r"no encoder 'gtpq', only minmax, fit, gptq"):
        check_encoder("gtpq")


def test_experts_are_fitted_to_what_each_reads():
    """Blocks do not end with an expert's rows."""
    weight = mx.array(np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32))
    importance = mx.stack([matrix(1, 1, 64, mx.float32)[1], matrix(2, 1, 64, mx.float32)[1]])
    request = TensorRequest("experts.weight", (2, 3, 64), "matrix", True, None, ("experts.weight",), None)
    quantizer = Quantizer(OutputTensor(request, mx.float32, Format(4, 32), mx.float32), importance)
    rows = weight.reshape(6, 64)
    parts = [quantizer(Dense(rows[first:last])) for first, last in ((0, 4), (4, 6))]
    alone = [fit(weight[expert], Format(4, 32), importance[expert]) for expert in range(2)]
    for index, name in enumerate(("weight", "scales", "biases")):
        together = mx.concatenate([part[index] for part in parts])
        assert mx.array_equal(together, mx.concatenate([getattr(each, name) for each in alone]))
