"""The gated delta net against its definition, token by token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.nn.gated_delta import DeltaSizes, GatedDelta
from mlxinfer.nn.linear import JoinedLinear, Linear
from mlxinfer.nn.weights import Dense

SIZES = DeltaSizes(hidden=12, key_heads=2, value_heads=6, key_dim=8, value_dim=10, taps=4)


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.5


@pytest.fixture
def layer() -> GatedDelta:
    widths = [SIZES.channels, SIZES.value_heads, SIZES.value_heads, SIZES.values]
    parts = [Linear(Dense(mx.array(random(width, SIZES.hidden, seed=seed)))) for seed, width in enumerate(widths)]
    return GatedDelta(
        layer=0,
        sizes=SIZES,
        inputs=JoinedLinear(parts, widths),
        output=Linear(Dense(mx.array(random(SIZES.hidden, SIZES.values, seed=5)))),
        convolution=mx.array(random(SIZES.channels, SIZES.taps, 1, seed=6)),
        decay=mx.array(random(SIZES.value_heads, seed=7)),
        decay_bias=mx.array(random(SIZES.value_heads, seed=8)),
        norm=mx.ones(SIZES.value_dim),
        eps=1e-6,
    )


def states(batch: int) -> tuple[mx.array, ...]:
    return tuple(mx.zeros((batch, *shape)) for shape in SIZES.spec.shapes)


def token_by_token(layer: GatedDelta, x: np.ndarray) -> np.ndarray:
    """`[L, channels + 2 * value_heads]` to `[L, values]`."""
    taps, each = np.array(layer.convolution)[..., 0], SIZES.value_heads // SIZES.key_heads
    window = np.zeros((SIZES.taps - 1, SIZES.channels))
    state = np.zeros((SIZES.value_heads, SIZES.key_dim, SIZES.value_dim))
    rows = []
    for row in x.astype(np.float64):
        qkv, beta, decay = np.split(row, [SIZES.channels, SIZES.channels + SIZES.value_heads])
        window = np.concatenate([window, qkv[None]])
        mixed = (window.T * taps).sum(axis=1)
        window = window[1:]
        q, k, v = np.split(mixed / (1 + np.exp(-mixed)), [SIZES.keys, 2 * SIZES.keys])
        q, k = (part.reshape(SIZES.key_heads, SIZES.key_dim) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, k = np.repeat(q, each, axis=0) / np.sqrt(SIZES.key_dim), np.repeat(k, each, axis=0)
        rate = np.exp(np.array(layer.decay)) * np.log1p(np.exp(decay + np.array(layer.decay_bias)))
        state = state * np.exp(-rate)[:, None, None]
        change = v.reshape(SIZES.value_heads, SIZES.value_dim) - np.einsum("hkv,hk->hv", state, k)
        state = state + np.einsum("hk,hv->hkv", k, change / (1 + np.exp(-beta))[:, None])
        rows.append(np.einsum("hkv,hk->hv", state, q).reshape(-1))
    return np.array(rows)


def test_a_sequence_advances_as_defined(layer: GatedDelta) -> None:
    x = random(70, SIZES.channels + 2 * SIZES.value_heads, seed=9)
    y, _ = layer.update(mx.array(x)[None], states(1))
    np.testing.assert_allclose(y[0], token_by_token(layer, x), atol=1e-5)


def test_chunks_give_the_same_as_the_whole(layer: GatedDelta) -> None:
    x = mx.array(random(2, 30, SIZES.channels + 2 * SIZES.value_heads, seed=9))
    whole, last = layer.update(x, states(2))
    rows, held = [], states(2)
    for start, stop in [(0, 1), (1, 2), (2, 20), (20, 30)]:
        y, held = layer.update(x[:, start:stop], held)
        rows.append(y)
    np.testing.assert_allclose(mx.concatenate(rows, axis=1), whole, atol=1e-5)
    for one, other in zip(held, last, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_states_stay_in_float32_whatever_the_inputs_are(layer: GatedDelta) -> None:
    x = mx.array(random(1, 3, SIZES.channels + 2 * SIZES.value_heads, seed=9)).astype(mx.bfloat16)
    y, held = layer.update(x, states(1))
    assert [state.dtype for state in held] == [mx.float32, mx.float32]
    assert [tuple(state.shape[1:]) for state in held] == list(SIZES.spec.shapes)
    reference, _ = layer.update(x.astype(mx.float32), states(1))
    np.testing.assert_allclose(y.astype(mx.float32), reference, atol=0.02)
