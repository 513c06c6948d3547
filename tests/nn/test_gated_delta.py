"""The gated delta net against its definition, token by token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.nn.gated_delta import TRIAL, DeltaSizes, GatedDelta
from mlxinfer.nn.linear import JoinedLinear, Linear
from mlxinfer.nn.weights import Dense

BY_HEAD = DeltaSizes(hidden=12, key_heads=2, value_heads=6, key_dim=8, value_dim=10, taps=4)
BY_CHANNEL = DeltaSizes(hidden=12, key_heads=3, value_heads=3, key_dim=8, value_dim=8, taps=4, by_channel=True)


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.5


@pytest.fixture(params=[BY_HEAD, BY_CHANNEL], ids=["by head", "by channel"])
def layer(request: pytest.FixtureRequest) -> GatedDelta:
    sizes: DeltaSizes = request.param
    widths = [sizes.channels, sizes.value_heads, sizes.decays, sizes.values]
    parts = [Linear(Dense(mx.array(random(width, sizes.hidden, seed=seed)))) for seed, width in enumerate(widths)]
    return GatedDelta(
        layer=0,
        sizes=sizes,
        inputs=JoinedLinear(parts, widths),
        output=Linear(Dense(mx.array(random(sizes.hidden, sizes.values, seed=5)))),
        convolution=mx.array(random(sizes.channels, sizes.taps, 1, seed=6)),
        decay=mx.array(random(sizes.decays, seed=7)),
        decay_bias=mx.array(random(sizes.decays, seed=8)),
        norm=mx.ones(sizes.value_dim),
        eps=1e-6,
    )


def states(layer: GatedDelta, batch: int) -> tuple[mx.array, ...]:
    return tuple(mx.zeros((batch, *shape)) for shape in layer.sizes.spec.shapes)


def width(layer: GatedDelta) -> int:
    return layer.sizes.channels + layer.sizes.value_heads + layer.sizes.decays


def token_by_token(layer: GatedDelta, x: np.ndarray) -> np.ndarray:
    """`[L, channels + value_heads + decays]` to `[L, values]`."""
    sizes = layer.sizes
    taps, each = np.array(layer.convolution)[..., 0], sizes.value_heads // sizes.key_heads
    window = np.zeros((sizes.taps - 1, sizes.channels))
    state = np.zeros((sizes.value_heads, sizes.key_dim, sizes.value_dim))
    rows = []
    for row in x.astype(np.float64):
        qkv, beta, decay = np.split(row, [sizes.channels, sizes.channels + sizes.value_heads])
        window = np.concatenate([window, qkv[None]])
        mixed = (window.T * taps).sum(axis=1)
        window = window[1:]
        q, k, v = np.split(mixed / (1 + np.exp(-mixed)), [sizes.keys, 2 * sizes.keys])
        q, k = (part.reshape(sizes.key_heads, sizes.key_dim) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        q, k = np.repeat(q, each, axis=0) / np.sqrt(sizes.key_dim), np.repeat(k, each, axis=0)
        rate = np.exp(np.array(layer.decay)) * np.log1p(np.exp(decay + np.array(layer.decay_bias)))
        state = state * np.exp(-rate).reshape(sizes.value_heads, -1)[:, :, None]
        change = v.reshape(sizes.value_heads, sizes.value_dim) - np.einsum("hkv,hk->hv", state, k)
        state = state + np.einsum("hk,hv->hkv", k, change / (1 + np.exp(-beta))[:, None])
        rows.append(np.einsum("hkv,hk->hv", state, q).reshape(-1))
    return np.array(rows)


def test_a_sequence_advances_as_defined(layer: GatedDelta) -> None:
    x = random(70, width(layer), seed=9)
    y, _ = layer.update(mx.array(x)[None], states(layer, 1))
    np.testing.assert_allclose(y[0], token_by_token(layer, x), atol=1e-5)


def test_chunks_give_the_same_as_the_whole(layer: GatedDelta) -> None:
    x = mx.array(random(2, 30, width(layer), seed=9))
    whole, last = layer.update(x, states(layer, 2))
    rows, held = [], states(layer, 2)
    for start, stop in [(0, 1), (1, 2), (2, 20), (20, 30)]:
        y, held = layer.update(x[:, start:stop], held)
        rows.append(y)
    np.testing.assert_allclose(mx.concatenate(rows, axis=1), whole, atol=1e-5)
    for one, other in zip(held, last, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_states_stay_in_float32_whatever_the_inputs_are(layer: GatedDelta) -> None:
    x = mx.array(random(1, 3, width(layer), seed=9)).astype(mx.bfloat16)
    y, held = layer.update(x, states(layer, 1))
    assert [state.dtype for state in held] == [mx.float32, mx.float32]
    assert [tuple(state.shape[1:]) for state in held] == list(layer.sizes.spec.shapes)
    reference, _ = layer.update(x.astype(mx.float32), states(layer, 1))
    np.testing.assert_allclose(y.astype(mx.float32), reference, atol=0.02)


def test_decay_by_channel_without_the_operation_of_mlx(layer: GatedDelta, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the operation failed its trial, tokens are computed one by one."""
    x = mx.array(random(2, 9, width(layer), seed=9))
    fast, last = layer.update(x, states(layer, 2))
    monkeypatch.setattr(TRIAL, "obstacle", lambda *kind: "it differs")
    slow, other = layer.update(x, states(layer, 2))
    np.testing.assert_allclose(slow, fast, atol=1e-5)
    np.testing.assert_allclose(other[1], last[1], atol=1e-5)


def test_the_operation_of_mlx_passes_its_trial() -> None:
    assert TRIAL.obstacle(2, 16, 16) is None
    assert TRIAL.obstacle(4, 128, 128) is None


@pytest.mark.parametrize("least", [1, 17])
def test_a_kernel_for_certain_heads_and_lengths_that_reads_one_share_per_head_is_found(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake kernel resembles a Metal kernel of MLX for certain numbers of heads."""
    right = mx.fast.gated_delta_update

    def wrong(q: mx.array, k: mx.array, v: mx.array, kept: mx.array, *rest: mx.array) -> list[mx.array]:
        if k.shape[2] == 3 and k.shape[1] >= least:
            kept = kept.flatten()[: kept[..., 0].size].reshape(kept.shape[:3])
        return right(q, k, v, kept, *rest)

    monkeypatch.setattr(mx.fast, "gated_delta_update", wrong)
    assert TRIAL.problem((2, 16, 16)) is None
    problem = TRIAL.problem((3, 16, 16))
    assert problem is not None
    assert "differs" in (problem.obstacle or "")
