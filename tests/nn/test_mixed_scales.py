"""Products of bfloat16 rows with matrices whose scales are float16, compared with float64."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.nn.linear import Embedding, Linear, multiply
from mlxinfer.nn.moe import ExpertLinear
from mlxinfer.nn.weights import Format, Quantized

FORM = Format(4, 32)


def halves(*shape: int, size: float = 0.05) -> Quantized:
    weight = mx.random.normal(shape, key=mx.random.key(shape[-1])) * size
    return Quantized(*mx.quantize(weight.astype(mx.float16), group_size=32, bits=4), FORM)


def exact(x: mx.array, matrix: Quantized, of: Callable[[np.ndarray], np.ndarray] = np.positive) -> np.ndarray:
    """float64; of the numbers themselves, or of their sizes."""
    rows, numbers = (of(np.array(part.astype(mx.float32)).astype(np.float64)) for part in (x, matrix.dequantize(mx.float32)))
    return np.asarray(rows @ numbers.swapaxes(-1, -2))


def assert_near(found: mx.array, expected: np.ndarray, sums: np.ndarray) -> None:
    """Within a rounding of the result, and the error of float16 sums on a CPU."""
    assert found.dtype == mx.bfloat16
    error = np.abs(np.array(found.astype(mx.float32)) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 2.0**-9 * sums).all(), (error / sums).max()


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e5, 1e6], ids=str)
def test_products_of_any_size(size: float) -> None:
    """Activations of Gemma leave the range of float16."""
    x = (mx.random.normal((5, 96), key=mx.random.key(1)) * size).astype(mx.bfloat16)
    matrix = halves(33, 96)
    sums = exact(x, matrix, np.abs)
    assert_near(multiply(x, matrix), exact(x, matrix), sums)
    bias = (mx.random.normal((33,), key=mx.random.key(2)) * size).astype(mx.bfloat16)
    assert_near(Linear(matrix, bias)(x), exact(x, matrix) + np.array(bias.astype(mx.float32)), 2 * sums)


def test_experts() -> None:
    x = mx.random.normal((6, 1, 96), key=mx.random.key(1)).astype(mx.bfloat16)
    matrix, chosen = halves(4, 33, 96), mx.array([3, 0, 1, 1, 2, 3])
    found = ExpertLinear(matrix)(x, chosen)
    picked = matrix.each(lambda array: array[chosen])
    assert_near(found, exact(x, picked), exact(x, picked, np.abs))


def test_rows_of_an_embedding_are_rounded_once() -> None:
    matrix = halves(40, 96)
    rows = Embedding(matrix, mx.bfloat16)(mx.arange(40))
    expected = np.array(matrix.dequantize(mx.float32))
    assert rows.dtype == mx.bfloat16
    assert (np.abs(np.array(rows.astype(mx.float32)) - expected) <= 2.0**-8 * np.abs(expected) + 1e-4).all()


def test_other_mixtures_are_left_to_mlx() -> None:
    x, matrix = mx.ones((2, 96), mx.float16), halves(8, 96)
    assert multiply(x, matrix).dtype == mx.float16
    assert multiply(x.astype(mx.float32), matrix).dtype == mx.float32
