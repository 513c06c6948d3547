"""Error feedback against its definition, in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import kernels_cpu
from mlxinfer.convert.encode import gptq
from mlxinfer.convert.encode.affine import fit_parts
from mlxinfer.convert.encode.gptq import add_gram, encode_with_feedback, factorize
from mlxinfer.errors import ConversionError
from mlxinfer.nn.weights import Format

no_kernels = pytest.mark.skipif(not kernels_cpu.can_feed_back(), reason=f"CPU kernels: {kernels_cpu.status()}")
WAYS = [pytest.param(gptq._by_mlx, id="mlx"), pytest.param(gptq._by_kernel, id="kernels", marks=no_kernels)]


def inputs(seed: int, columns: int, tokens: int = 600) -> np.ndarray:
    """Return correlated inputs `[tokens, columns]` of very different sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, columns // 2)) @ rng.standard_normal((columns // 2, columns)) / 8
    return ((mixed + 0.3 * rng.standard_normal((tokens, columns))) * rng.random(columns) ** 3 * 3).astype(np.float32)


def gram(x: np.ndarray) -> np.ndarray:
    sums = np.zeros((x.shape[1], x.shape[1]), np.float32)
    add_gram(sums, mx.array(x))
    return sums / len(x)


def matrix(seed: int, rows: int, columns: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_t(4, (rows, columns)).astype(np.float32) / 30).astype(dtype)


def decoded(parts: gptq.Parts, group_size: int) -> np.ndarray:
    codes, scales, biases = (np.array(part.astype(mx.float32), np.float64) for part in parts)
    return codes * np.repeat(scales, group_size, -1) + np.repeat(biases, group_size, -1)


def loss(weight: mx.array, parts: gptq.Parts, group_size: int, hessian: np.ndarray) -> float:
    error = decoded(parts, group_size) - np.array(weight.astype(mx.float32), np.float64)
    return float(np.einsum("ri,ij,rj->", error, hessian.astype(np.float64), error))


def by_definition(weight: np.ndarray, hessian: np.ndarray, scales: np.ndarray, biases: np.ndarray, form: Format) -> np.ndarray:
    """Run the published algorithm in float64: the inverse's Cholesky factor, errors pushed into all later columns."""
    damped = hessian.astype(np.float64)
    mean = damped.diagonal().mean()
    damped = damped + np.diag(np.where(damped.diagonal() > 0, 0, mean) + gptq.DAMPING * mean)
    order = np.argsort(-hessian.diagonal(), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    left, codes = weight[:, order].astype(np.float64), np.zeros(weight.shape)
    for at, column in enumerate(order):
        scale, bias = scales[:, column // form.group_size], biases[:, column // form.group_size]
        codes[:, column] = np.clip(np.round((left[:, at] - bias) / scale), 0, 2**form.bits - 1)
        error = (left[:, at] - (codes[:, column] * scale + bias)) / upper[at, at]
        left[:, at:] -= error[:, None] * upper[at, at:]
    return codes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bits", "group_size", "rows", "columns"), [(4, 64, 37, 320), (2, 32, 5, 96), (3, 128, 1, 384), (8, 32, 17, 160)])
def test_codes_are_those_of_the_published_algorithm(monkeypatch, way, bits, group_size, rows, columns):
    monkeypatch.setattr(gptq, "_by_kernel" if kernels_cpu.can_feed_back() else "_by_mlx", way)
    weight, form, hessian = matrix(bits, rows, columns), Format(bits, group_size), gram(inputs(bits, columns))
    codes, scales, biases = encode_with_feedback(weight, form, factorize(hessian, "it"))
    plain, *parts = (np.array(part.astype(mx.float32), np.float64) for part in (weight, scales, biases))
    expected = by_definition(plain, hessian, *parts, form)
    differing = (np.array(codes) != expected).any(-1).mean()  # a number halfway between two codes may round either way
    assert differing <= 0.15, differing
    best = loss(weight, (mx.array(expected.astype(np.uint8)), scales, biases), group_size, hessian)
    assert loss(weight, (codes, scales, biases), group_size, hessian) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_less_is_lost_than_by_the_fit_on_inputs_that_correlate(bits, group_size):
    dtype = {32: mx.float32, 64: mx.bfloat16, 128: mx.float16}[group_size]
    weight, hessian = matrix(bits, 9, 256, dtype), gram(inputs(bits, 256))
    form, factor = Format(bits, group_size), factorize(hessian, "it")
    found, fitted = encode_with_feedback(weight, form, factor), fit_parts(weight, form, factor.importance)
    assert found[1].dtype == found[2].dtype == dtype
    if bits < 8 or dtype == mx.float32:
        assert loss(weight, found, group_size, hessian) < 0.8 * loss(weight, fitted, group_size, hessian)


@no_kernels
def test_both_ways_find_the_same_codes():
    weight, form, factor = matrix(0, 203, 192), Format(4, 64), factorize(gram(inputs(0, 192)), "it")
    _, scales, biases = fit_parts(weight, form, factor.importance)
    first, second = (np.array(way(weight, form, factor, scales, biases)) for way in (gptq._by_mlx, gptq._by_kernel))
    assert (first != second).mean() < 0.002


def test_sums_of_squares_are_not_rounded_to_16_bits():
    """A bfloat16 sum of the same inputs would be far outside the tolerance."""
    x = inputs(3, 64, 4096)
    exact = x.astype(np.float64).T @ x.astype(np.float64)
    limit = 1e-5 * np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    sums = np.zeros((64, 64), np.float32)
    for first in range(0, 4096, 512):
        add_gram(sums, mx.array(x[first : first + 512]))
    assert (np.abs(sums - exact) <= limit).all()
    rounded = mx.zeros((64, 64), mx.bfloat16)
    for first in range(0, 4096, 512):
        piece = mx.array(x[first : first + 512])
        rounded = rounded + (piece.T @ piece).astype(mx.bfloat16)
    assert not (np.abs(np.array(rounded.astype(mx.float32)) - exact) <= limit).all()


def test_sums_of_16_bit_inputs_are_in_float32():
    x = mx.array(inputs(4, 96)).astype(mx.bfloat16)
    sums = np.zeros((96, 96), np.float32)
    add_gram(sums, x)
    plain = np.array(x.astype(mx.float32), np.float64)
    np.testing.assert_allclose(sums, plain.T @ plain, rtol=1e-4, atol=1e-3)


def test_factors_multiply_to_the_matrix(monkeypatch):
    """Panels and parts do not divide the sizes."""
    monkeypatch.setattr(gptq, "_PANEL", 48)
    monkeypatch.setattr(gptq, "_PART", 80)
    hessian = gram(inputs(5, 210))
    factor = factorize(hessian, "it")
    upper = np.triu(factor.upper.astype(np.float64), 1) + np.eye(210)
    damped = hessian[np.ix_(factor.order, factor.order)].astype(np.float64)
    damped[np.diag_indices(210)] += gptq.DAMPING * hessian.diagonal().mean()
    inverse = np.linalg.inv(upper)
    middle = inverse @ damped @ inverse.T
    scale = np.sqrt(np.outer(middle.diagonal(), middle.diagonal()))
    assert np.abs(middle / scale - np.eye(210)).max() < 1e-3


def test_a_column_that_is_never_used_and_fewer_tokens_than_columns():
    x = inputs(6, 128, 40)
    x[:, 5] = 0
    weight, form = matrix(6, 3, 128), Format(4, 32)
    parts = encode_with_feedback(weight, form, factorize(gram(x), "it"))
    error = np.abs(decoded(parts, 32) - np.array(weight.astype(mx.float32)))[:, 5]
    assert (error <= np.abs(np.array(parts[1].astype(mx.float32)))[:, 0]).all()


def test_nan_names_the_tensor():
    hessian = gram(inputs(7, 64))
    hessian[3, 4] = np.nan
    with pytest.raises(ConversionError, match=r"inputs of model\.layers\.3\.mlp\.down_proj\.weight became NaN"):
        factorize(hessian, "model.layers.3.mlp.down_proj.weight")
