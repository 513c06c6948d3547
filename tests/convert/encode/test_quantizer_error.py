"""The error of a matrix, weighted with its inputs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.convert.encode.quantizer import Quantizer, _squares
from mlxinfer.convert.plan.weight_map import OutputTensor
from mlxinfer.loading.weights import TensorRequest
from mlxinfer.nn.weights import Dense, Format


@pytest.mark.parametrize("experts", [1, 3])
def test_it_is_that_of_the_definition(experts: int) -> None:
    mx.random.seed(0)
    rows, form = 8, Format(4, 32)
    shape = (rows, 64) if experts == 1 else (experts, rows, 64)
    weight, importance = mx.random.normal((experts * rows, 64)), mx.random.uniform(0.01, 4.0, (experts, 64))
    output = OutputTensor(TensorRequest("w.weight", shape, "matrix", True, None, ("w.weight",), None), mx.float32, form, mx.float32)
    quantizer, plain = Quantizer(output, importance[0] if experts == 1 else importance), Quantizer(output)
    found = [mx.concatenate(parts) for parts in zip(quantizer(Dense(weight[:5])), quantizer(Dense(weight[5:])), strict=True)]
    decoded = mx.dequantize(*found, group_size=32, bits=4)
    w, d, i = (np.array(each, np.float64) for each in (weight, decoded, mx.repeat(importance, rows, axis=0)))
    assert quantizer.weighted_error == pytest.approx(np.sqrt((i * (w - d) ** 2).sum() / (i * w**2).sum()), rel=1e-4)
    assert quantizer.error == pytest.approx(np.sqrt(((w - d) ** 2).sum() / (w**2).sum()), rel=1e-4)
    plain(Dense(weight))
    assert plain.weighted_error is None


@pytest.mark.parametrize("weighed", [False, True])
def test_sums_of_large_blocks_are_exact(weighed: bool) -> None:
    values = mx.random.normal((2048, 1024), key=mx.random.key(1)) + 1.0
    weights = mx.random.uniform(0.01, 4.0, (1024,), key=mx.random.key(2))
    squares = np.array(values, np.float64) ** 2
    expected = float((squares * np.array(weights, np.float64)).sum() if weighed else squares.sum())
    # NumPy adds in float32 by blocks whose size depends on the processor; MLX was off by 4e-3.
    assert _squares(values, weights if weighed else None) == pytest.approx(expected, rel=1e-4)
    assert _squares(values.astype(mx.bfloat16)) == pytest.approx(float(squares.sum()), rel=1e-3)
