"""Recurrent layers against float64, at odd sizes: sequences of several lengths together, and the same tokens in several steps."""

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.packed_matrices import DTYPES

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import Program, run_blocks

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(x, 0)


def convolved(x, window, weights, bias=None):
    """Rows `[T, C]` after a window `[taps - 1, C]`, weights `[C, taps, 1]`; and the window afterwards."""
    row = np.concatenate([window, x])
    taps = weights.shape[1]
    y = sum(row[j : j + len(x)] * weights[:, j, 0] for j in range(taps))
    return (y if bias is None else y + bias), row[len(x) :]


def advance(program, hidden, width, counts, states, x, dtype):
    """The first `width` columns of the stream afterwards, and the states."""
    blocks = program.finish()
    assert blocks is not None
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    arrays = [mx.array(s.astype(np.float32)) for s in states]
    stretches = [(int(a), int(n)) for a, n in zip(starts, counts, strict=True)]
    after = run_blocks(mx.array(x).astype(DTYPES[dtype]), blocks, [], [], [], [], states=arrays, stretches=stretches)
    mx.eval(after.rows, after.states)
    return np.array(after.rows.astype(mx.float32), np.float64)[:, :width], [np.array(a, np.float64) for a in after.states]


def rounded(a, dtype):
    return np.array(mx.array(a.astype(np.float32)).astype(DTYPES[dtype]).astype(mx.float32), np.float64)


def each_sequence(counts, states, x, step):
    """`step(rows, states of one sequence)` for each; rows of all, and their states."""
    found, after, start = [], [], 0
    for i, count in enumerate(counts):
        y, new = step(x[start : start + count], [s[i] for s in states])
        found.append(y)
        after.append(new)
        start += count
    return np.concatenate(found), [np.stack(each) for each in zip(*after, strict=True)]


def check(program, hidden, width, states, draw, step, dtype):
    """Steps of several sequences, each from where the last one ended."""
    wanted = states
    for counts in ([3, 1], [1, 1], [1, 70], [130, 2]):
        x = rounded(draw((sum(counts), hidden)), dtype)
        got, states = advance(program, hidden, width, counts, states, x, dtype)
        want, wanted = each_sequence(counts, wanted, x, step)
        scale = np.abs(want).max()
        assert np.abs(got - want).max() <= TOLERANCE[dtype] * scale
        for mine, other in zip(states, wanted, strict=True):
            assert np.abs(mine - other).max() <= 2e-5 * max(np.abs(other).max(), 1)
        wanted = states


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("unit", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("sizes", "by_channel"), [((2, 6, 33, 19, 4), False), ((1, 1, 16, 4, 2), False), ((3, 3, 5, 7, 3), False), ((2, 4, 21, 6, 3), True)]
)
def test_gated_delta(sizes, by_channel, unit, dtype):
    rng = np.random.default_rng(1)
    key_heads, value_heads, key_dim, value_dim, taps = sizes
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    rates = value_heads * (key_dim if by_channel else 1)
    hidden = channels + value_heads + rates + values
    weights, a, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((channels, taps, 1), (rates,), (rates,)))
    norm = rng.standard_normal(value_dim).astype(np.float32)
    program = Program(hidden, DTYPES[dtype])
    x = program.stream
    inputs = x.columns(0, channels), x.columns(channels, value_heads), x.columns(channels + value_heads, rates)
    y = program.delta(inputs, (key_heads, value_heads, key_dim, value_dim), mx.array(weights), mx.array(a), mx.array(bias))
    gate = x.columns(channels + value_heads + rates, values)
    y = program.gated_norm(y, gate, mx.array(norm), 1e-5, first=True, unit=unit, groups=value_heads)
    program.add(y, x.columns(0, values))

    def step(rows, states):
        mixed, window = convolved(rows[:, :channels], states[0], weights)
        mixed, state, found = silu(mixed), states[1], []
        beta = sigmoid(rows[:, channels : channels + value_heads])
        kept = np.exp(-np.exp(a) * softplus(rows[:, channels + value_heads : channels + value_heads + rates] + bias))
        kept = kept.reshape(len(rows), value_heads, 1, -1)
        for t in range(len(rows)):
            q, k = (mixed[t, i * keys : (i + 1) * keys].reshape(key_heads, key_dim) for i in (0, 1))
            q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
            q, k = (np.repeat(each, value_heads // key_heads, axis=0) for each in (q / np.sqrt(key_dim), k))
            v = mixed[t, 2 * keys :].reshape(value_heads, value_dim)
            state = state * kept[t]
            delta = (v - np.einsum("hvk,hk->hv", state, k)) * beta[t, :, None]
            state = state + delta[..., None] * k[:, None]
            y = np.einsum("hvk,hk->hv", state, q)
            found.append((y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * norm).reshape(-1))
        return np.array(found) * (silu if unit == "silu" else sigmoid)(rows[:, hidden - values :]), [window, state]

    states = [rng.standard_normal((2, taps - 1, channels)), rng.standard_normal((2, value_heads, value_dim, key_dim))]
    check(program, hidden, values, states, rng.standard_normal, step, dtype)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("sizes", "first", "biased", "least"), [((6, 5, 19, 2, 4), True, True, 0.0), ((3, 7, 33, 1, 2), False, False, 0.3)]
)
def test_mamba(sizes, first, biased, least, dtype):
    rng = np.random.default_rng(2)
    heads, dim, size, groups, taps = sizes
    inner = heads * dim
    channels = inner + 2 * groups * size
    hidden = inner + channels + heads
    weights, vectors = rng.standard_normal((channels, taps, 1)).astype(np.float32), rng.standard_normal((3, heads)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32) if biased else None
    norm = rng.standard_normal(inner).astype(np.float32) if biased else None
    program = Program(hidden, DTYPES[dtype])
    x = program.stream
    parts = x.columns(inner, channels), x.columns(inner + channels, heads)
    limits = least, float("inf")
    made = [mx.array(v) for v in vectors]
    y = program.mamba(parts, (heads, dim, size, groups), mx.array(weights), None if bias is None else mx.array(bias), made, limits)
    weight = None if norm is None else mx.array(norm)
    y = program.gated_norm(y, x.columns(0, inner), weight, 1e-5, normed=biased, first=first, groups=groups)
    program.add(y, x.columns(0, inner))
    decay, skip, step_bias = vectors

    def step(rows, states):
        mixed, window = convolved(rows[:, inner : inner + channels], states[0], weights, bias)
        mixed, state, found = silu(mixed), states[1], []
        steps = np.maximum(softplus(rows[:, inner + channels :] + step_bias), least)
        for t in range(len(rows)):
            h = mixed[t, :inner].reshape(heads, dim)
            write, read = (mixed[t, inner:].reshape(2, groups, size).repeat(heads // groups, axis=1)[i] for i in (0, 1))
            kept = np.exp(-np.exp(decay) * steps[t])
            state = state * kept[:, None, None] + (h * steps[t, :, None])[..., None] * write[:, None]
            found.append((np.einsum("hpn,hn->hp", state, read) + h * skip[:, None]).reshape(-1))
        y, gate = np.array(found), silu(rows[:, :inner])
        y = y if first else y * gate
        if norm is not None:
            grouped = y.reshape(len(y), groups, -1)
            y = (grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + 1e-5)).reshape(len(y), -1) * norm
        return (y * gate if first else y), [window, state]

    states = [rng.standard_normal((2, taps - 1, channels)), rng.standard_normal((2, heads, dim, size))]
    check(program, hidden, inner, states, rng.standard_normal, step, dtype)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("width", "taps", "biased"), [(37, 3, True), (1030, 4, False), (5, 2, False)])
def test_short_convolution(width, taps, biased, dtype):
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((width, taps, 1)).astype(np.float32)
    bias = rng.standard_normal(width).astype(np.float32) if biased else None
    program = Program(3 * width, DTYPES[dtype])
    before, after, x = (program.stream.columns(i * width, width) for i in range(3))
    y = program.short_convolution(before, after, x, mx.array(weights), None if bias is None else mx.array(bias))
    program.add(y, before)

    def step(rows, states):
        y, window = convolved(rows[:, :width] * rows[:, 2 * width :], states[0], weights, bias)
        return rows[:, width : 2 * width] * y, [window]

    check(program, 3 * width, width, [rng.standard_normal((2, taps - 1, width))], rng.standard_normal, step, dtype)


def test_states_that_do_not_fit_are_refused():
    program = Program(6, mx.float32)
    parts = [program.stream.columns(i * 2, 2) for i in range(3)]
    program.add(program.short_convolution(*parts, mx.zeros((2, 3, 1)), None), parts[0])
    blocks = program.finish()
    for states, stretches in (
        ([], []),
        ([mx.zeros((1, 1, 2))], [(0, 1)]),
        ([mx.zeros((1, 2, 2))], [(0, 2)]),
        ([mx.zeros((2, 2, 2))], [(0, 1)]),
    ):
        with pytest.raises(ValueError, match="run_blocks"):
            run_blocks(mx.zeros((1, 6)), blocks, [], [], [], [], states=states, stretches=stretches)
    with pytest.raises(ValueError, match="stretches"):
        run_blocks(mx.zeros((1, 6)), blocks, [], [], [], [], states=[mx.zeros((1, 2, 2))], stretches=[(1, 1)])


def test_a_state_that_others_hold_is_not_written():
    program = Program(6, mx.float32)
    stream = program.stream
    y = program.mamba(
        (stream.columns(1, 3), stream.columns(4, 1)), (1, 1, 1, 1), mx.ones((3, 2, 1)), None, [mx.zeros((1,))] * 3, (0.0, 9.0)
    )
    program.add(program.gated_norm(y, stream.columns(0, 1), None, 0.0, normed=False), stream.columns(0, 1))
    blocks, held = program.finish(), mx.ones((1, 1, 1, 1)) + 0
    after = run_blocks(mx.ones((1, 6)), blocks, [], [], [], [], states=[mx.zeros((1, 1, 3)), held], stretches=[(0, 1)])
    mx.eval(after.states)
    assert held.item() == 1
    assert after.states[1].item() != 1
