"""Activations against float64."""

import math

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.packed_matrices import DTYPES, UNIT, random, to_numpy

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.can_compute_towers(), reason=f"no such operation: {kernels_cpu.status()}")

with np.errstate(over="ignore"):
    FUNCTIONS = {
        "gelu": lambda x: 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2)),
        "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
        "silu": lambda x: x / (1 + np.exp(-x)),
    }


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 16), (300, 177)])
def test_like_float64(name, shape, dtype):
    x = random(np.random.default_rng(shape[0]), shape, dtype) * 4
    want = FUNCTIONS[name](to_numpy(x))
    got = kernels_cpu.activate(x, name)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(to_numpy(got), want, rtol=2 * UNIT[dtype] + 2e-6, atol=1e-6 if dtype == "float16" else 4e-7)


def test_every_activation_is_compared():
    assert set(FUNCTIONS) == set(kernels_cpu.ACTIVATIONS)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_limits_and_nan(name):
    got = np.array(kernels_cpu.activate(mx.array([0.0, 1e30, -1e30, 50.0, -50.0, float("nan")]), name))
    np.testing.assert_array_equal(got[:2], np.float32([0, 1e30]))
    np.testing.assert_allclose(got[2:5], [0, 50, 0], atol=1e-19)
    assert np.isnan(got[5])


def test_columns_of_a_wider_matrix():
    x = random(np.random.default_rng(0), (40, 96), "float32")
    np.testing.assert_array_equal(np.array(kernels_cpu.activate(x[:, 7:60], "gelu")), np.array(kernels_cpu.activate(x, "gelu"))[:, 7:60])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="activate"):
        kernels_cpu.activate(mx.zeros((3,), mx.int32), "gelu")
