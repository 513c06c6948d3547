"""Routers, products with chosen experts and sums of them against float64, as parts of a program."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.packed_matrices import DTYPES

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import Program, ProgramProjection, Router, run_blocks
from mlxinfer.nn.routes import biased_route, softmax_then_top, top_then_softmax

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

EXPERTS, HIDDEN = 12, 48
BIAS = np.random.default_rng(0).standard_normal(EXPERTS).astype(np.float32)
ROUTES = {
    "softmax": softmax_then_top(3, normalized=False),
    "normalized": softmax_then_top(5, normalized=True),
    "top": top_then_softmax(4),
    "all": top_then_softmax(EXPERTS),
    "biased": biased_route(3, mx.array(BIAS), added=1e-20, scale=2.5),
    "plain": biased_route(2, None, normalized=False, least=0.5),
    "groups": biased_route(3, mx.array(BIAS), groups=4, kept=2, added=0.1),
    "ranked": biased_route(2, None, "softmax", groups=3, kept=1, ranked=1, scale=0.5),
}


def run(program, x, dtype):
    after = run_blocks(mx.array(x).astype(DTYPES[dtype]), program.finish(), [], [], [], [])
    return np.array(after.rows.astype(mx.float32), np.float64)


def rounded(a, dtype):
    return np.array(mx.array(a.astype(np.float32)).astype(DTYPES[dtype]).astype(mx.float32), np.float64)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", list(ROUTES))
def test_experts(name, dtype):
    rng, route = np.random.default_rng(3), ROUTES[name]
    matrices = rounded(rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)), dtype)
    biases = rounded(rng.standard_normal((EXPERTS, HIDDEN)), dtype)
    packed = kernels_cpu.pack(mx.array(matrices.astype(np.float32)).astype(DTYPES[dtype]))
    program = Program(HIDDEN, DTYPES[dtype])
    stream = program.stream
    gains = rng.standard_normal(EXPERTS).astype(np.float32) if name in ("normalized", "groups") else np.ones(EXPERTS, np.float32)
    choice = program.choose(stream.columns(7, EXPERTS), replace(route.router, gains=mx.array(gains)))
    y = program.multiply(stream, ProgramProjection(packed, mx.array(biases.astype(np.float32))), "inner", experts=choice.experts)
    y = program.multiply(y, ProgramProjection(packed), "outer", experts=choice.experts)
    program.add(y, stream, onto=stream, shares=choice.shares, factor=0.5)
    x = rounded(rng.standard_normal((37, HIDDEN)), dtype)
    best, shares = route(mx.array(x[:, 7 : 7 + EXPERTS].astype(np.float32)))
    want = x.copy()
    for t in range(len(x)):
        for expert, share in zip(np.array(best)[t], np.array(shares)[t], strict=True):
            inner = rounded(matrices[expert] @ x[t] + biases[expert], dtype)
            want[t] += 0.5 * share * gains[expert] * rounded(matrices[expert] @ inner, dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    assert np.abs(run(program, x, dtype) - want).max() <= tolerance * np.abs(want).max()


def test_experts_are_different_ones_whatever_the_logits():
    program = Program(HIDDEN, mx.float32)
    packed = kernels_cpu.pack(mx.array(np.stack([np.full((HIDDEN, HIDDEN), 2.0**e) for e in range(EXPERTS)]).astype(np.float32)))
    choice = program.choose(program.stream.columns(0, EXPERTS), Router(4, "none"))
    program.add(program.multiply(program.stream.columns(0, HIDDEN), ProgramProjection(packed), "y", experts=choice.experts), program.stream)
    for value in (np.nan, -np.inf, np.inf, 0.0):
        x = np.zeros((1, HIDDEN))
        x[0, :EXPERTS], x[0, -1] = value, 1.0
        if value == 0.0:
            powers = run(program, x, "float32")[0, 0]
            assert bin(int(powers)).count("1") == 4
        else:
            run(program, x, "float32")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_gates(dtype):
    rng, heads, dim = np.random.default_rng(4), 3, 13
    width = 3 * heads * dim
    x = rounded(rng.standard_normal((9, width)) * 3, dtype)
    part = heads * dim

    def made(unit, **settings):
        program = Program(width, DTYPES[dtype])
        a, both = program.stream.columns(0, part), program.stream.columns(part, 2 * part)
        program.gate(a, both if settings.get("parts") else both.columns(0, part), unit, a, **settings)
        return run(program, x, dtype)[:, :part]

    a, g = x[:, :part], x[:, part : 2 * part]
    clamped = np.minimum(g, 1.5)
    apart = x[:, part:].reshape(9, heads, 2 * dim)[..., :dim].reshape(9, part)
    wanted = {
        "silu": 1.7 * g / (1 + np.exp(-1.7 * g)) * a,
        "gelu_tanh": 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * a,
        "relu_squared": np.maximum(g, 0) ** 2,
        "clamped_swiglu": clamped / (1 + np.exp(-1.7 * clamped)) * (np.clip(a, -1.5, 1.5) + 1),
    }
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    for unit, want in wanted.items():
        settings = {"clamped_swiglu": {"alpha": 1.7, "limit": 1.5}, "silu": {"alpha": 1.7}}.get(unit, {})
        assert np.abs(made(unit, **settings) - want).max() <= tolerance * np.abs(want).max()
    got = made("sigmoid", parts=heads, step=2 * dim)
    assert np.abs(got - a / (1 + np.exp(-apart))).max() <= tolerance * np.abs(a).max()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sums_weighed_by_a_gate(dtype):
    program, x = Program(21, DTYPES[dtype]), rounded(np.random.default_rng(5).standard_normal((5, 21)), dtype)
    stream = program.stream
    program.add(stream.columns(0, 10), stream.columns(0, 10), onto=stream.columns(10, 10), gate=stream.columns(20, 1), factor=3.0)
    want = x[:, 10:20] + 3 * x[:, :10] / (1 + np.exp(-x[:, 20:]))
    assert np.abs(run(program, x, dtype)[:, :10] - want).max() <= {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype] * 5


def test_wrong_routers_are_refused():
    for router in (Router(0, "none"), Router(EXPERTS + 1, "none"), Router(2, "softmax", groups=5), Router(5, "sigmoid", groups=4, kept=1)):
        program = Program(EXPERTS, mx.float32)
        program.choose(program.stream, router)
        with pytest.raises(ValueError, match="blocks"):
            program.finish()


class Pool:
    """Copies chosen experts from whole matrices into the slots of smaller ones, as many at a time as there are slots."""

    def __init__(self, whole, slots):
        self.arrays, self.slots = [mx.zeros((slots, *a.shape[1:]), a.dtype) for a in whole], slots
        mx.eval(self.arrays)
        # As bytes, since MLX must not compute anything in its own thread.
        self.whole, self.places = ([np.array(a.view(mx.uint8), copy=False) for a in arrays] for arrays in (whole, self.arrays))
        self.waves, self.expected = 0, []

    def __call__(self, chosen, expected, wave, slots):
        self.waves += 1
        self.expected.append(expected.tolist())
        experts = np.unique(chosen)[wave * self.slots : (wave + 1) * self.slots]
        for slot, expert in enumerate(experts):
            for place, whole in zip(self.places, self.whole, strict=True):
                place[slot] = whole[expert]
        places = {expert: slot for slot, expert in enumerate(experts.tolist())}
        slots[:] = [places.get(expert, -1) for expert in chosen.tolist()]
        return bool(chosen.max() > experts.max())


def mixture_program(dtype, into, bias, out, router, pool=None):
    """Experts with a gate of their own, from whole matrices or from a pool."""
    program = Program(HIDDEN, dtype)
    choice = program.choose(program.stream.columns(0, EXPERTS), router)

    def experts(chosen):
        both = program.multiply(program.stream, ProgramProjection(into, bias), "inner", experts=chosen)
        gated = program.view("gated", HIDDEN, both.each)
        gates, ups = both.columns(0, HIDDEN), both.columns(HIDDEN, HIDDEN)
        program.gate(ups, gates, "clamped_swiglu", gated, alpha=1.7, limit=1.5, experts=None if pool is None else chosen)
        return program.multiply(gated, ProgramProjection(out), "outer", experts=chosen)

    if pool is None:
        y = experts(choice.experts)
    else:
        with program.waves(choice.experts, pool, choice.experts) as slots:
            y = experts(slots)
    program.add(y, program.stream, onto=program.stream, shares=choice.shares)
    return program


@pytest.mark.skipif(not kernels_cpu.can_run_waves(), reason="an older module")
@pytest.mark.parametrize("slots", [4, 5, EXPERTS])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_experts_in_waves_are_bit_for_bit_those_in_memory(dtype, rows, slots):
    rng, kind = np.random.default_rng(rows), DTYPES[dtype]
    draw = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32)).astype(kind)  # noqa: E731
    into, bias, out = (
        kernels_cpu.pack(draw(EXPERTS, 2 * HIDDEN, HIDDEN)),
        draw(EXPERTS, 2 * HIDDEN),
        kernels_cpu.pack(draw(EXPERTS, HIDDEN, HIDDEN)),
    )
    x, router = rng.standard_normal((rows, HIDDEN)), top_then_softmax(4).router
    pool = Pool([into.data, bias, out.data], slots)
    pooled = replace(into, data=pool.arrays[0]), pool.arrays[1], replace(out, data=pool.arrays[2])
    want = run(mixture_program(kind, into, bias, out, router), x, dtype)
    np.testing.assert_array_equal(run(mixture_program(kind, *pooled, router, pool), x, dtype), want)
    chosen = np.array(top_then_softmax(4)(mx.array(x[:, :EXPERTS].astype(np.float32)))[0])
    assert pool.waves == -(-len(np.unique(chosen)) // slots)
    assert {frozenset(e) for e in pool.expected} == {frozenset(chosen.flatten().tolist())}


@pytest.mark.skipif(not kernels_cpu.can_run_waves(), reason="an older module")
def test_a_pool_that_fails_ends_the_waves():
    whole = kernels_cpu.pack(mx.zeros((EXPERTS, HIDDEN, HIDDEN)))

    def fail(*_):
        raise OSError("no disk")

    program = Program(HIDDEN, mx.float32)
    choice = program.choose(program.stream.columns(0, EXPERTS), top_then_softmax(4).router)
    with program.waves(choice.experts, fail) as slots:
        y = program.multiply(program.stream, ProgramProjection(whole), "y", experts=slots)
    program.add(y, program.stream, shares=choice.shares)
    assert run(program, np.ones((2, HIDDEN)), "float32").shape == (2, HIDDEN)


@pytest.mark.skipif(not kernels_cpu.can_run_waves(), reason="an older module")
def test_a_wave_has_products_and_gates_of_its_slots_only():
    whole = ProgramProjection(kernels_cpu.pack(mx.zeros((EXPERTS, HIDDEN, HIDDEN))))

    def waves(body):
        program = Program(HIDDEN, mx.float32)
        choice = program.choose(program.stream.columns(0, EXPERTS), top_then_softmax(4).router)
        with program.waves(choice.experts, lambda *_: False) as slots:
            body(program, choice, slots)
        return program.finish()

    waves(lambda program, choice, slots: program.multiply(program.stream, whole, "y", experts=slots))
    for wrong in (
        lambda program, choice, slots: None,
        lambda program, choice, slots: program.multiply(program.stream, whole, "y", experts=choice.experts),
        lambda program, choice, slots: program.gate(program.stream, program.stream, "silu", program.stream),
        lambda program, choice, slots: program.choose(program.stream.columns(0, EXPERTS), top_then_softmax(4).router),
    ):
        with pytest.raises(ValueError, match="wave"):
            waves(wrong)
