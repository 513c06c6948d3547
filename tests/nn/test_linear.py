"""Products with plain and packed matrices, joined or not, are the products of their values."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import RandomWeights, pack

from mlxinfer.nn.linear import Embedding, JoinedLinear, Linear
from mlxinfer.nn.weights import Dense, Format

AFFINE = Format(4, 32)
FORMATS = [
    None,
    AFFINE,
    Format(2, 64),
    Format(3, 32),
    Format(5, 32),
    Format(6, 64),
    Format(8, 128),
    Format(4, 32, "mxfp4"),
    Format(8, 32, "mxfp8"),
    Format(4, 16, "nvfp4"),
]


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def matrix(out: int, form: Format | None, seed: int = 1) -> Dense:
    weight = random(out, 128, seed=seed)
    return Dense(weight) if form is None else pack(weight, form)


def value(stored: Dense) -> mx.array:
    return stored.weight if isinstance(stored, Dense) else stored.dequantize(mx.float32)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_product_is_that_of_the_values(form: Format | None) -> None:
    x, bias = random(5, 128), random(24, seed=9)
    stored = matrix(24, form)
    expected = x @ value(stored).T
    np.testing.assert_allclose(Linear(stored)(x), expected, atol=2e-4)
    np.testing.assert_allclose(Linear(stored, bias)(x), expected + bias, atol=2e-4)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_an_embedding_gathers_rows_and_serves_as_a_head(form: Format | None) -> None:
    table = matrix(40, form)
    embedding = Embedding(table, mx.float32)
    tokens = mx.array([3, 39, 3, 0])
    np.testing.assert_allclose(embedding(tokens), value(table)[tokens], atol=1e-6)
    np.testing.assert_allclose(embedding.as_linear(random(2, 128)), random(2, 128) @ value(table).T, atol=2e-4)


@pytest.mark.parametrize(
    ("forms", "products"),
    [
        ([None, None, None], 1),
        ([AFFINE, AFFINE, AFFINE], 1),
        ([AFFINE, AFFINE, Format(8, 32)], 2),
        ([AFFINE, None, AFFINE], 3),
        ([Format(4, 32, "mxfp4"), AFFINE, AFFINE], 2),
    ],
)
def test_neighbours_that_are_stored_alike_are_joined(forms: list[Format | None], products: int) -> None:
    sizes = [8, 24, 16]
    parts = [Linear(matrix(size, form, seed)) for seed, (size, form) in enumerate(zip(sizes, forms, strict=True))]
    joined = JoinedLinear(parts, sizes)
    x = random(3, 128)
    assert len(joined.linears) == products
    for part, y in zip(parts, joined(x), strict=True):
        np.testing.assert_allclose(y, part(x), atol=1e-5)


@pytest.mark.smoke
def test_joined_biases_stay_with_their_rows() -> None:
    parts = [Linear(matrix(size, None, size), random(size, seed=size)) for size in (4, 6)]
    x = random(3, 128)
    for part, y in zip(parts, JoinedLinear(parts, [4, 6])(x), strict=True):
        np.testing.assert_allclose(y, part(x), atol=1e-5)


def test_a_part_without_bias_is_not_joined_to_one_with() -> None:
    joined = JoinedLinear([Linear(matrix(4, None), random(4)), Linear(matrix(4, None, 2))], [4, 4])
    assert len(joined.linears) == 2


def test_a_fused_matrix_is_split_like_its_rows() -> None:
    stored = Linear(matrix(12, None))
    x = random(3, 128)
    first, second = JoinedLinear.fused(stored, [4, 8])(x)
    np.testing.assert_array_equal(mx.concatenate([first, second], axis=-1), stored(x))


def test_loading_asks_for_a_bias_only_where_there_is_one() -> None:
    weights = RandomWeights()
    Linear.load(weights, "a", 4, 8)
    Linear.load(weights, "b", 4, 8, bias=True)
    assert list(weights.asked) == ["a.weight", "b.weight", "b.bias"]


def test_halves_of_one_row_lie_as_rows_of_their_own() -> None:
    """MLX's Metal products copy a row whose stride is not its length."""
    stored = Linear(matrix(8, None))
    x = random(1, 128)
    first, second = JoinedLinear.fused(stored, [4, 4])(x)
    np.testing.assert_array_equal(mx.concatenate([first, second], axis=-1), stored(x))
    assert [memoryview(half).strides for half in (first, second)] == [(16, 4)] * 2


@pytest.mark.parametrize(
    ("form", "bias", "apart"),
    [(AFFINE, mx.float32, True), (AFFINE, mx.float16, False), (AFFINE, None, False), (None, mx.float32, False)],
    ids=str,
)
def test_only_the_bias_of_a_quantized_product_may_be_added_later(form: Format | None, bias: mx.Dtype | None, apart: bool) -> None:
    weights = [random(8, 64, seed=1), random(16, 64, seed=2)]
    biases = [None if bias is None else random(len(weight), seed=3).astype(bias) for weight in weights]
    parts = [Linear(Dense(w) if form is None else pack(w, form), b) for w, b in zip(weights, biases, strict=True)]
    joined, x = JoinedLinear(parts, [8, 16]), random(3, 64)
    (y,), later = joined.runs_and_bias(x)
    assert (later is not None) == apart
    np.testing.assert_allclose(y if later is None else y + later, joined.runs(x)[0], rtol=1e-6)
