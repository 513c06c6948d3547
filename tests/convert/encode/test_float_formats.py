"""Scales of small floating-point formats, near those of `mx.quantize`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.convert.encode.affine import fit
from mlxinfer.loading.weights import quantize
from mlxinfer.nn.weights import Format, Quantized

FORMS = [Format(4, 32, "mxfp4"), Format(8, 32, "mxfp8"), Format(4, 16, "nvfp4")]
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def loss(weight: mx.array, found: Quantized, importance: np.ndarray) -> float:
    difference = np.array(found.dequantize(mx.float32), np.float64) - np.array(weight.astype(mx.float32), np.float64)
    return float((importance * difference**2).sum())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mode)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_less_is_lost_than_by_the_largest_number_alone(form: Format, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(0)
    weight = mx.array(rng.standard_t(4, (37, 192)).astype(np.float32) / 30).astype(dtype)
    importance = rng.random(192) ** 6 + 1e-3
    found, plain = fit(weight, form, mx.array(importance.astype(np.float32))), quantize(weight, form)
    assert (found.weight.shape, found.weight.dtype, found.scales.dtype) == (plain.weight.shape, mx.uint32, mx.uint8)
    assert found.biases is None
    limit = {"mxfp4": 0.95, "nvfp4": 0.9, "mxfp8": 1.0}[form.mode]
    assert loss(weight, found, importance) <= limit * loss(weight, plain, importance)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mode)
def test_numbers_that_were_in_the_format_are_found_again(form: Format) -> None:
    """The largest code of a group is not the largest possible one; a scale from that code alone misses some groups."""
    rng = np.random.default_rng(1)
    groups = 128 // form.group_size
    if form.bits == 4:
        codes = TABLE[rng.integers(0, rng.integers(4, 9, (50, groups, 1)), (50, groups, form.group_size))]
    else:
        codes = np.array(mx.from_fp8(mx.array(rng.integers(0, 0x7E, (50, groups, 32)).astype(np.uint8)), mx.float32))
    scales = 2.0 ** rng.integers(-5, -2, (50, groups, 1))  # the range in which scales of nvfp4 are most exact
    weight = mx.array((codes * scales * rng.choice([-1, 1], codes.shape)).reshape(50, 128).astype(np.float32))
    assert mx.array_equal(fit(weight, form).dequantize(mx.float32), weight)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mode)
def test_groups_of_zeros_and_tiny_numbers(form: Format) -> None:
    rows = np.zeros((3, 64), np.float32)
    rows[1], rows[2, 5] = 1e-30, 300
    found = np.array(fit(mx.array(rows), form).dequantize(mx.float32))
    assert np.isfinite(found).all()
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[2, 5], 300, rtol=0.25)
