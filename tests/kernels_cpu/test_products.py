"""Packed products against float64: within what rounding explains, for every format, shape, precision and instruction set."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.packed_matrices import DTYPES, FORMATS, UNIT, assert_within, draw, normed, product, random, to_numpy
from support.processes.examples import examples

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu.native import native

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

PRECISIONS = list(kernels_cpu.PRECISIONS)


def used(packed: kernels_cpu.Packed) -> str:
    return packed.precision if packed.layout.has_integers else "float32"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_format(form, precision):
    rng = np.random.default_rng(FORMATS.index(form))
    for n, k, rows in ((17, 128, 3), (80, 384, 1), (33, 640, 31)):
        m = draw(rng, form, (n, k))
        x = random(rng, (rows, k), "float32")
        packed = m.pack(precision)
        assert packed.shape == (n, k)
        got = packed.multiply(x)
        assert_within(got, *product(to_numpy(x), m, used(packed)), "float32")


@settings(max_examples=examples(150))
@given(
    form=st.sampled_from(FORMATS),
    n=st.integers(1, 50),
    k=st.integers(1, 5),
    odd=st.integers(0, 31),
    rows=st.one_of(st.integers(1, 40), st.just(130)),
    scales=st.sampled_from(list(DTYPES)),
    dtype=st.sampled_from(list(DTYPES)),
    precision=st.sampled_from(PRECISIONS),
    norm=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_shape_with_its_steps_around(form, n, k, odd, rows, scales, dtype, precision, norm, bias, residual, seed):
    rng = np.random.default_rng(seed)
    k = k * 32 - odd if form[0] == "plain" else k * max(form[2], 32)
    m = draw(rng, form, (n, k), scales)
    packed = m.pack(precision)
    x = random(rng, (rows, k), dtype)
    taken = {
        "norm": random(rng, (k,), dtype) if norm else None,
        "bias": random(rng, (n,), dtype) if bias else None,
        "residual": random(rng, (rows, n), dtype) if residual else None,
    }
    got = packed.multiply(x, **taken, eps=1e-3)
    weight = to_numpy(taken["norm"]) if norm else None
    want, error = product(normed(to_numpy(x), weight, 1e-3), m, used(packed), norm)
    for added in (taken["bias"], taken["residual"]):
        if added is not None:
            want = want + to_numpy(added)
            error = error + UNIT["float32"] * (np.abs(want) + error)
    assert_within(got, want, error, dtype if packed.dtype is None or packed.dtype == x.dtype else "float32")


ACTIVATIONS = {
    "silu": (lambda x: x / (1 + np.exp(-x)), lambda x: np.abs(x)),
    "gelu_tanh": (
        lambda x: x * (1 / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
        lambda x: 1.6 * np.abs(x + 0.044715 * x**3),
    ),
}
"""The activation in float64, and the exponent that it takes e to, whose rounding counts that many times."""


@settings(max_examples=examples(40))
@given(
    activation=st.sampled_from(list(ACTIVATIONS)),
    form=st.sampled_from(FORMATS),
    pairs=st.integers(1, 3),
    rows=st.integers(1, 20),
    bias=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(0, 99),
)
def test_gates(activation, form, pairs, rows, bias, precision, seed):
    rng = np.random.default_rng(seed)
    half, k = 16 * pairs, max(form[2], 32)
    m = draw(rng, form, (2 * half, k))
    packed = m.pack(precision)
    x, b = random(rng, (rows, k), "float32") * 0.2, random(rng, (2 * half,), "float32") if bias else None
    assert packed.can_gate(activation)
    got = packed.multiply(x, gate=activation, bias=b)
    (value, exponent), (z, error) = ACTIVATIONS[activation], product(to_numpy(x), m, used(packed))
    z = z if b is None else z + to_numpy(b)
    error = error + UNIT["float32"] * (np.abs(z) + error)
    gate, up, gate_error, up_error = z[:, :half], z[:, half:], error[:, :half], error[:, half:]
    with np.errstate(over="ignore"):
        act = value(gate)
    act_error = 1.13 * gate_error + 8 * UNIT["float32"] * (1 + exponent(gate)) * np.abs(act)  # no slope is above 1.13
    assert_within(got, act * up, act_error * (np.abs(up) + up_error) + np.abs(act) * up_error, "float32")


@settings(max_examples=examples(40))
@given(
    form=st.sampled_from(FORMATS),
    experts=st.integers(1, 6),
    tokens=st.integers(1, 30),
    chosen=st.integers(1, 4),
    bias=st.booleans(),
    each=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(0, 99),
)
def test_experts(form, experts, tokens, chosen, bias, each, precision, seed):
    """Choices come as often as they like; `each` choice has a row of its own, or a token's choices share one."""
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 40)), max(form[2], 32)
    m = draw(rng, form, (experts, n, k))
    packed = m.pack(precision)
    assert packed.shape == (experts, n, k)
    choice = rng.integers(0, experts, (tokens, chosen)).astype(rng.choice([np.int32, np.uint32, np.int64, np.uint8]))
    x = random(rng, (tokens, chosen, k) if each else (tokens, k), "float32")
    b = random(rng, (experts, n), "float32") if bias else None
    got = packed.multiply(x, experts=mx.array(choice), bias=b)
    assert got.shape == (tokens, chosen, n)
    single = [kernels_cpu.pack(*(a[e] for a in m.arrays), **m.options, precision=precision) for e in range(experts)]
    for t in range(tokens):
        for c in range(chosen):
            e = int(choice[t, c])
            alone = single[e].multiply(x[t, c][None] if each else x[t][None], bias=None if b is None else b[e])
            assert same_bits(got[t, c], alone[0])


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array(a.view(mx.uint8)).tobytes() == np.array(b.view(mx.uint8)).tobytes()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(form, precision):
    rng = np.random.default_rng(3)
    m = draw(rng, form, (40, 128))
    packed, x = m.pack(precision), random(rng, (47, 128), "float32")
    norm = random(rng, (128,), "float32")
    together = packed.multiply(x, norm=norm, eps=1e-5)
    for first in range(47):
        for count in (1, 2, 3, 7, 9, 16, 30):
            if first % count == 0:
                part = packed.multiply(x[first : first + count], norm=norm, eps=1e-5)
                assert same_bits(part, together[first : first + count])


@pytest.mark.smoke
@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_rows_than_one_chunk(precision):
    rng = np.random.default_rng(4)
    m = draw(rng, ("affine", 4, 64), (20, 4096))
    packed, x = m.pack(precision), random(rng, (150, 4096), "float32")
    got = packed.multiply(x)
    assert_within(got, *product(to_numpy(x), m, precision), "float32")
    for first in (0, 63, 64, 65, 149):
        assert same_bits(packed.multiply(x[first : first + 1]), got[first : first + 1])


@pytest.mark.parametrize("scales", list(DTYPES))
@pytest.mark.parametrize("gate", [None, "silu"])
def test_many_rows_of_plain_matrices(scales, gate):
    """Columns are taken in parts, and rows beyond the last tile by other kernels."""
    rng = np.random.default_rng(5)
    m = draw(rng, ("plain", 0, 1), (96, 1700), scales)
    packed, x = m.pack(), random(rng, (150, 1700), "float32")
    x[17, 900] = float("nan")
    got = packed.multiply(x, gate=gate)
    assert np.isnan(np.array(got)).any(axis=1).nonzero()[0].tolist() == [17]
    for first in (0, 11, 12, 23, 149):
        assert same_bits(packed.multiply(x[first : first + 1], gate=gate), got[first : first + 1])
    if gate is None:
        whole = np.arange(150) != 17
        want, error = product(to_numpy(x)[whole], m, "float32")
        assert_within(got[mx.array(whole.nonzero()[0])], want, error, "float32")


ARRANGED = {
    "columns of a wider one": lambda x: mx.concatenate([x, x], -1)[:, : x.shape[1]],
    "one element behind alignment": lambda x: mx.concatenate([mx.zeros((1,), x.dtype), x.reshape(-1)])[1:].reshape(x.shape),
    "odd columns of a wider one": lambda x: mx.concatenate([mx.zeros((len(x), 1), x.dtype), x], -1)[:, 1:],
    "transposed": lambda x: mx.contiguous(x.T).T,
    "every other row": lambda x: mx.stack([x, x * 0], 1).reshape(-1, x.shape[1])[::2],
    "rows backwards": lambda x: mx.contiguous(x[::-1])[::-1],
    "columns backwards": lambda x: mx.contiguous(x[:, ::-1])[:, ::-1],
    "three axes": lambda x: mx.contiguous(x.reshape(2, 3, -1).swapaxes(0, 1)).swapaxes(0, 1),
    "one row for all": lambda x: mx.broadcast_to(x[:1], x.shape),
    "rows repeated": lambda x: mx.broadcast_to(x[:2, None], (2, 3, x.shape[1])),
    "rows taken in turn": lambda x: mx.broadcast_to(x[None, :3], (2, 3, x.shape[1])),
}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("arranged", ARRANGED)
def test_views_of_any_kind(arranged, dtype):
    rng = np.random.default_rng(5)
    packed = draw(rng, ("affine", 4, 32), (40, 64), dtype).pack()
    x = ARRANGED[arranged](random(rng, (6, 64), dtype))
    residual = ARRANGED[arranged](random(rng, (6, 40), dtype))
    plain = [mx.array(np.array(a.astype(mx.float32))).astype(a.dtype) for a in (x, residual)]
    assert same_bits(packed.multiply(x, residual=residual), packed.multiply(plain[0], residual=plain[1]))
    assert same_bits(kernels_cpu.rms_norm(residual, None, 1e-5, residual), kernels_cpu.rms_norm(plain[1], None, 1e-5, plain[1]))
    assert same_bits(kernels_cpu.silu_multiply(x, x), kernels_cpu.silu_multiply(plain[0], plain[0]))


def test_bits_do_not_depend_on_the_prefetch_distance():
    # The first 60 products of one row with a large matrix try several distances.
    rng = np.random.default_rng(5)
    packed = draw(rng, ("affine", 8, 32), (1024, 1056)).pack()
    x = random(rng, (1, 1056), "float32")
    first = to_numpy(packed.multiply(x))
    for _ in range(70):
        np.testing.assert_array_equal(to_numpy(packed.multiply(x)), first)


@pytest.mark.smoke
def test_views_of_weights():
    rng = np.random.default_rng(6)
    m = draw(rng, ("affine", 3, 32), (4, 30, 96))
    x = random(rng, (2, 96), "float32")
    views = [mx.concatenate([a, a], 1)[1, 3:20] for a in m.arrays]
    copies = [mx.array(np.array(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a)).astype(a.dtype) for a in views]
    got, want = (kernels_cpu.pack(*a, **m.options).multiply(x) for a in (views, copies))
    assert same_bits(got, want)


@settings(max_examples=examples(60))
@given(
    form=st.sampled_from(FORMATS),
    scales=st.sampled_from(list(DTYPES)),
    dtype=st.sampled_from(list(DTYPES)),
    n=st.integers(1, 40),
    k=st.integers(1, 70),
    indices=st.lists(st.integers(-3, 45), max_size=40),
    seed=st.integers(0, 99),
)
def test_single_rows(form, scales, dtype, n, k, indices, seed):
    rng = np.random.default_rng(seed)
    m = draw(rng, form, (n, k if form[0] == "plain" else max(form[2], 32)), scales)
    got = m.pack().rows(mx.array(np.array(indices, np.int32)), DTYPES[dtype])
    want = m.values[np.clip(indices, 0, n - 1)] if indices else np.zeros((0, m.values.shape[1]))
    assert_within(got, want, 2 * UNIT["float32"] * np.abs(want), dtype)


DIGEST = """
import hashlib, sys
sys.path.insert(0, "tests")
import numpy as np
from support.oracles.packed_matrices import FORMATS, draw, random
digest = hashlib.sha256()
for i, form in enumerate(FORMATS):
    rng = np.random.default_rng(i)
    m, x = draw(rng, form, (200, 384)), random(rng, (70, 384), "float32")
    for precision in ("float32", "int16", "int8"):
        digest.update(np.array(m.pack(precision).multiply(x)).tobytes() + np.array(m.pack(precision).multiply(x[:1])).tobytes())
print(digest.hexdigest())
"""


def run(code: list[str], **environment: str) -> str:
    done = subprocess.run([sys.executable, *code], env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bits_do_not_depend_on_the_number_of_threads():
    assert len({run(["-c", DIGEST], MLXINFER_THREADS=threads) for threads in ("1", "2", "7")}) == 1


@pytest.mark.long
@pytest.mark.skipif("MLXINFER_CPU_ISA" in os.environ, reason="this is one of those runs")
@pytest.mark.parametrize("isa", ["portable", "avx2", "dotprod"])
def test_lower_instruction_sets(isa):
    if isa not in native.compiled_isas():
        pytest.skip(f"the module was not built for {isa}: MLXINFER_ALL_ISAS=1 builds it for all sets of an architecture")
    if isa in native.compiled_isas()[native.compiled_isas().index(native.machine_isa()) :]:
        pytest.skip(f"this machine has nothing above {isa}")
    folder = os.path.dirname(__file__)
    chosen = "every_format or beside_it or gates or of_heads or large_scores or number_of_examples or norm or silu or patch or activate"
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", folder, "-k", chosen], MLXINFER_CPU_ISA=isa)
