"""The native gate against float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.packed_matrices import DTYPES, UNIT, assert_within, random, to_numpy
from support.processes.examples import examples

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())


@pytest.mark.smoke
@settings(max_examples=examples(60))
@given(
    shape=st.lists(st.integers(0, 5), max_size=2).map(tuple),
    size=st.one_of(st.integers(0, 70), st.just(20000)),
    dtype=st.sampled_from(list(DTYPES)),
    spread=st.sampled_from([1.0, 30.0]),
    halves=st.booleans(),
    seed=st.integers(0, 99),
)
def test_like_float64(shape, size, dtype, spread, halves, seed):
    rng = np.random.default_rng(seed)
    both = random(rng, (*shape, 2 * size), dtype) * spread
    gate, up = (both[..., :size], both[..., size:]) if halves else (mx.contiguous(a) for a in mx.split(both, 2, -1))
    g, u = to_numpy(gate), to_numpy(up)
    with np.errstate(over="ignore"):
        want = g / (1 + np.exp(-g)) * u
    error = 6 * UNIT["float32"] * (1 + np.abs(g)) * np.abs(want) + 1e-36  # e^x below the smallest float counts as zero
    assert_within(kernels_cpu.silu_multiply(gate, up), want, error, dtype)


def test_nan_and_infinity_as_in_mlx():
    values = mx.array([float("nan"), float("inf"), -float("inf"), 0.0, 1.0, -200.0, 200.0])
    gate, up = (mx.broadcast_to(a, (7, 7)) for a in (values[:, None], values[None]))
    np.testing.assert_allclose(kernels_cpu.silu_multiply(gate, up), gate * mx.sigmoid(gate) * up, rtol=1e-6)


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        (mx.zeros((2, 3)), mx.zeros((3, 2))),
        (mx.zeros(()), mx.zeros(())),
        (mx.zeros((2,)), mx.zeros((2,), mx.float16)),
        (mx.zeros((2,), mx.int32), mx.zeros((2,), mx.int32)),
    ],
)
def test_wrong_arguments_are_refused(gate, up):
    with pytest.raises(ValueError, match="silu_multiply"):
        kernels_cpu.silu_multiply(gate, up)
