"""Mixtures of experts against a loop over tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import pack

from mlxinfer.nn.activations import gated
from mlxinfer.nn.linear import JoinedLinear, Linear
from mlxinfer.nn.moe import SORT_FROM, ExpertLinear, Experts, MixtureOfExperts
from mlxinfer.nn.routes import softmax_then_top, top_then_softmax
from mlxinfer.nn.weights import Dense, Format, Matrix

COUNT, HIDDEN, INNER = 5, 64, 96


def random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)) * 0.3


def experts(form: Format | None, biases: bool) -> Experts:
    def linear(out: int, in_dims: int, seed: int) -> ExpertLinear:
        weight = random(COUNT, out, in_dims, seed=seed)
        matrix: Matrix = Dense(weight) if form is None else pack(weight, form)
        return ExpertLinear(matrix, random(COUNT, out, seed=seed + 10) if biases else None)

    gate_up = JoinedLinear([linear(INNER, HIDDEN, 1), linear(INNER, HIDDEN, 2)], [INNER, INNER])
    return Experts(gate_up, linear(HIDDEN, INNER, 3), gated("silu"))


def one_by_one(parts: Experts, x: mx.array, chosen: mx.array) -> np.ndarray:
    def of(linear: Linear, expert: int) -> Linear:
        matrix = linear.matrix
        value = matrix.weight if isinstance(matrix, Dense) else matrix.dequantize(mx.float32)
        return Linear(Dense(value[expert]), None if linear.bias is None else linear.bias[expert])

    rows = []
    for token, row in enumerate(chosen.tolist()):
        for expert in row:
            gate, up = mx.split(of(parts.gate_up.linears[0], expert)(x[token : token + 1]), 2, axis=-1)
            rows.append(of(parts.down, expert)(gate * mx.sigmoid(gate) * up))
    return np.array(mx.concatenate(rows)).reshape(*chosen.shape, HIDDEN)


@pytest.mark.parametrize("tokens", [3, SORT_FROM])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("form", [None, Format(4, 32), Format(4, 32, "mxfp4")], ids=str)
def test_chosen_experts_give_what_each_alone_gives(form: Format | None, biases: bool, tokens: int) -> None:
    parts, x = experts(form, biases), random(tokens, HIDDEN, seed=7)
    chosen = mx.array(np.random.default_rng(3).integers(0, COUNT, (tokens, 2)), mx.uint32)
    np.testing.assert_allclose(parts(x, chosen), one_by_one(parts, x, chosen), atol=1e-3)


@pytest.mark.parametrize("normalized", [False, True])
def test_softmax_then_top(normalized: bool) -> None:
    logits = mx.array([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 5.0, 4.0]])
    best, shares = softmax_then_top(2, normalized=normalized)(logits)
    probabilities = np.array(mx.softmax(logits, axis=-1))
    for row, (chosen, weights) in enumerate(zip(best.tolist(), shares.tolist(), strict=True)):
        assert set(chosen) == set(np.argsort(probabilities[row])[-2:])
        expected = probabilities[row][chosen] / (probabilities[row][chosen].sum() if normalized else 1)
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_top_then_softmax() -> None:
    best, shares = top_then_softmax(2)(mx.array([[1.0, 3.0, 2.0, -1.0]]))
    assert dict(zip(best.tolist()[0], shares.tolist()[0], strict=True)) == pytest.approx({1: 0.7310586, 2: 0.2689414})


def test_all_experts_may_be_chosen() -> None:
    best, shares = softmax_then_top(3, normalized=True)(mx.array([[1.0, 3.0, 2.0]]))
    assert sorted(best.tolist()[0]) == [0, 1, 2]
    assert shares.sum().item() == pytest.approx(1)


def test_a_mixture_weighs_its_experts() -> None:
    parts, x = experts(None, False), random(4, HIDDEN, seed=7)
    router = Linear(Dense(random(COUNT, HIDDEN, seed=8)))
    route = softmax_then_top(2, normalized=True)
    chosen, shares = route(router(x))
    expected = (one_by_one(parts, x, chosen) * np.array(shares)[..., None]).sum(axis=1)
    np.testing.assert_allclose(MixtureOfExperts(router, route, parts)(x), expected, atol=1e-3)
