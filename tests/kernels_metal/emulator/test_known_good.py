"""Two kernels known to be good: clean in every mode and order, the same to the bit in all of them, and as exact as their dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from _pytest.mark import ParameterSet

from mlxinfer.kernels_metal import emulator

pytestmark = pytest.mark.emulator

HERE = Path(__file__).parent
EPSILON = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
RMS = emulator.metal_kernel("rms_norm", ["x", "weight", "eps"], ["out"], (HERE / "rms_norm.metal").read_text())
ATTENTION = emulator.metal_kernel("attention", ["q", "k", "v", "scale"], ["out"], (HERE / "attention.metal").read_text())


def _exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def rms_norm(dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    mx.random.seed(1)
    x, weight = mx.random.normal((3, 1027)).astype(dtype), mx.random.normal((1027,)).astype(dtype)
    call = {"template": [("T", dtype), ("N", 1027)], "output_shapes": [x.shape], "output_dtypes": [dtype]}
    out = RMS(inputs=[x, weight, 1e-5], grid=(128, 3, 1), threadgroup=(128, 1, 1), **call)[0]  # type: ignore[arg-type]
    a = _exact(x)
    return out, a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-5) * _exact(weight)


def attention(dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    mx.random.seed(2)
    q, k, v = (mx.random.normal((n, 64)).astype(dtype) for n in (3, 101, 101))
    call = {"template": [("T", dtype), ("D", 64), ("G", 4)], "output_shapes": [q.shape], "output_dtypes": [dtype]}
    out = ATTENTION(inputs=[q, k, v, 0.125], grid=(128, 3, 1), threadgroup=(128, 1, 1), **call)[0]  # type: ignore[arg-type]
    scores = _exact(q) @ _exact(k).T * 0.125
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return out, weights / weights.sum(-1, keepdims=True) @ _exact(v)


def _cases() -> Iterator[ParameterSet]:
    """Every mode with both kernels, and with every dtype."""
    for kernel in (rms_norm, attention):
        for dtype in EPSILON:
            for mode in emulator.MODES:
                often = mode == "fast" or (dtype == mx.float32) == (kernel == attention)
                yield pytest.param(kernel, dtype, mode, marks=() if often else pytest.mark.slow, id=f"{kernel.__name__}-{dtype}-{mode}")


@pytest.mark.parametrize(("kernel", "dtype", "mode"), _cases())
def test_known_good(kernel: object, dtype: mx.Dtype, mode: str) -> None:
    assert callable(kernel)
    out, expected = kernel(dtype)
    assert out.dtype == dtype
    assert np.abs(_exact(out) - expected).max() / np.abs(expected).max() < EPSILON[dtype]
    for order in emulator.ORDERS:
        with emulator.settings(mode=mode, order=order, seed=3):
            again, _ = kernel(dtype)
        # Fast mode contracts nothing, so that instrumented code computes the very same.
        assert mx.array_equal(out, again).item(), order


def test_signatures() -> None:
    inputs = [mx.zeros((3, 64)), mx.zeros((101, 64)), mx.zeros((101, 64)), mx.array(0.125)]
    template = [("T", mx.float32), ("D", 64), ("G", 4)]
    assert emulator.compare_signature(ATTENTION, inputs, output_dtypes=[mx.float32], template=template) == []
