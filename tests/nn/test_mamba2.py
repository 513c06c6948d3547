"""Mamba 2's recurrence against float64, token by token and in chunks."""

from __future__ import annotations

from math import inf

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.nn import mamba2
from mlxinfer.nn.linear import Linear
from mlxinfer.nn.mamba2 import Mamba2, MambaSizes
from mlxinfer.nn.weights import Dense

ALONE = MambaSizes(24, 4, 6, 5, 1, 4)
GROUPS = MambaSizes(24, 6, 4, 3, 2, 3, least=0.3, most=0.9)
LENGTH = 70  # a chunk and a bit


def numbers(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def layer(sizes: MambaSizes, *, bias: bool) -> Mamba2:
    projection = Linear(Dense(mx.zeros((8, 8))))  # not used
    vectors = [numbers(seed, sizes.heads) for seed in (3, 4, 5)]
    window = numbers(1, sizes.channels, sizes.taps, 1)
    return Mamba2(0, sizes, projection, projection, window, numbers(2, sizes.channels) if bias else None, *vectors, None, 1e-5)


def exact(mamba: Mamba2, x: mx.array, window: mx.array, state: mx.array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, and the states after the last token, by the definition."""
    s = mamba.sizes
    x, window, state, taps, decay, skip, bias = (
        np.array(a, np.float64) for a in (x, window, state, mamba.convolution[..., 0], mamba.decay, mamba.skip, mamba.step_bias)
    )
    row, each, outputs = np.concatenate([window, x[..., : s.channels]], axis=1), s.heads // s.groups, []
    for token in range(x.shape[1]):
        mixed = np.einsum("btc,ct->bc", row[:, token : token + s.taps], taps) + (0 if mamba.bias is None else np.array(mamba.bias))
        mixed = mixed / (1 + np.exp(-mixed))
        heads, write, read = np.split(mixed, [s.inner, s.inner + s.groups * s.state], axis=-1)
        heads = heads.reshape(-1, s.heads, s.dim)
        write, read = (np.repeat(part.reshape(-1, s.groups, s.state), each, axis=1) for part in (write, read))
        step = np.clip(np.log1p(np.exp(x[:, token, s.channels :] + bias)), s.least, s.most)
        state = state * np.exp(-np.exp(decay) * step)[..., None, None] + np.einsum("bhp,bhn,bh->bhpn", heads, write, step)
        outputs.append(np.einsum("bhpn,bhn->bhp", state, read) + heads * skip[:, None])
    return np.stack(outputs, axis=1).reshape(*x.shape[:2], s.inner), row[:, x.shape[1] :], state


@pytest.mark.parametrize(("sizes", "bias"), [(ALONE, True), (GROUPS, False)], ids=["one group", "two groups"])
@pytest.mark.parametrize("parts", [[LENGTH], [1] * LENGTH, [3, 1, 65, 1]], ids=["chunks", "token by token", "both"])
def test_answers_and_states_are_those_of_the_definition(sizes: MambaSizes, bias: bool, parts: list[int]) -> None:
    mamba, x = layer(sizes, bias=bias), numbers(6, 2, LENGTH, sizes.channels + sizes.heads)
    before = [numbers(7 + i, 2, *shape) for i, shape in enumerate(sizes.spec.shapes)]
    expected = exact(mamba, x, *before)
    states, found, start = tuple(before), [], 0
    for count in parts:
        y, states = mamba.update(x[:, start : start + count], states)
        found.append(y)
        start += count
    for ours, theirs in zip((mx.concatenate(found, axis=1), *states), expected, strict=True):
        np.testing.assert_allclose(np.array(ours), theirs, rtol=2e-4, atol=2e-5)


def test_a_token_has_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token needs few launches: a causal mask and its sums would be most of them."""
    monkeypatch.setattr(mamba2, "_causal", None)
    mamba = layer(ALONE, bias=True)
    assert ALONE.most == inf
    y, _ = mamba.update(numbers(6, 2, 1, ALONE.channels + ALONE.heads), tuple(mx.zeros((2, *shape)) for shape in ALONE.spec.shapes))
    assert y.shape == (2, 1, ALONE.inner)
