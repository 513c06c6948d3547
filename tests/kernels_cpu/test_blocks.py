"""Blocks as one operation give the bits of the operations that they consist of."""

import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.native_blocks import Block, blocks
from support.oracles.packed_matrices import DTYPES, draw, random
from support.processes.examples import examples

from mlxinfer import kernels_cpu
from mlxinfer.cache.kv_quantization import seal_keys, seal_values
from mlxinfer.kernels_cpu import ProgramProjection, run_blocks

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

HIDDEN, INNER, KV, PER_KV, DIM = 64, 96, 2, 3, 32
SCALE, EPS = 0.2, 1e-5


def projection(rng: np.random.Generator, n: int, k: int, dtype: str, bias: bool) -> ProgramProjection:
    return ProgramProjection(draw(rng, ("affine", 4, 32), (n, k), dtype).pack(), random(rng, (n,), dtype) if bias else None)


def norm(rng: np.random.Generator, size: int, dtype: str, there: bool) -> tuple[mx.array, float] | None:
    return (random(rng, (size,), dtype) * 0.1, EPS) if there else None


def block(rng: np.random.Generator, dtype: str, *, after: bool, heads_normed: bool, bias: bool, sinks: bool, pieces: int) -> Block:
    widths = [PER_KV * KV * DIM, KV * DIM, KV * DIM]
    joined = {1: [sum(widths)], 2: [widths[0], 2 * widths[1]], 3: widths}[pieces]
    return Block(
        before_attention=norm(rng, HIDDEN, dtype, True),
        after_attention=norm(rng, HIDDEN, dtype, after),
        before_mlp=norm(rng, HIDDEN, dtype, True),
        after_mlp=norm(rng, HIDDEN, dtype, after),
        qkv=[projection(rng, n, HIDDEN, dtype, bias) for n in joined],
        widths=widths,
        dim=DIM,
        query_norm=norm(rng, DIM, dtype, heads_normed),
        key_norm=norm(rng, DIM, dtype, heads_normed),
        sinks=random(rng, (KV * PER_KV,), "float32") if sinks else None,
        scale=SCALE,
        softcap=20.0 if sinks else None,
        output=projection(rng, HIDDEN, PER_KV * KV * DIM, dtype, bias),
        gate_up=projection(rng, 2 * INNER, HIDDEN, dtype, bias),
        gate="gelu_tanh" if after else "silu",
        down=projection(rng, HIDDEN, INNER, dtype, bias),
    )


def open_pages(count: int, dtype: str) -> list[list[mx.array]]:
    pages = [[mx.zeros((1, KV, 64, DIM), DTYPES[dtype]) for _ in range(2)] for _ in range(count)]
    mx.eval(pages)
    return pages


def sealed_pages(rng: np.random.Generator, dtype: str, bits: tuple[int, int]) -> list[mx.array]:
    keys, values = (random(rng, (KV, 6, 64, DIM), dtype) for _ in range(2))
    return [mx.contiguous(a) for a in seal_keys(keys, bits[0]) + seal_values(values, bits[1])]


def no_pages() -> list[mx.array]:
    return [mx.zeros((KV, 0, DIM, 64)), mx.zeros((KV, 0, 64, DIM))]


def one_by_one(x: mx.array, b: Block, open: list[mx.array], **pages) -> tuple:
    def times(p: ProgramProjection, x: mx.array, **steps) -> mx.array:
        return p.matrix.multiply(x, bias=p.bias, **steps)

    def added(p: ProgramProjection, x: mx.array, after, onto: mx.array) -> mx.array:
        return times(p, x, residual=onto) if after is None else kernels_cpu.rms_norm(times(p, x), *after, onto)

    weight, eps = b.before_attention
    rows = [times(p, x, norm=weight, eps=eps) for p in b.qkv]
    norms = {"query_norm": b.query_norm[0], "key_norm": b.key_norm[0], "eps": EPS} if b.query_norm else {}
    out, open, *full = kernels_cpu.paged_attention(rows, open=open, scale=b.scale, softcap=b.softcap, sinks=b.sinks, **norms, **pages)
    x = added(b.output, out, b.after_attention, x)
    inner = times(b.gate_up, x, norm=b.before_mlp[0], eps=b.before_mlp[1], gate=b.gate)
    return added(b.down, inner, b.after_mlp, x), open, [*full[0], *full[1]]


def raw(a: mx.array) -> bytes:
    return np.array(a.view(mx.uint8)).tobytes()


@settings(max_examples=examples(25))
@given(
    dtype=st.sampled_from(list(DTYPES)),
    after=st.booleans(),
    heads_normed=st.booleans(),
    bias=st.booleans(),
    sinks=st.booleans(),
    turned=st.booleans(),
    pieces=st.integers(1, 3),
    counts=st.lists(st.integers(1, 140), min_size=1, max_size=3),
    bits=st.sampled_from([(16, 16), (16, 16), (8, 4), (16, 5), (3, 16)]),
    first16=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bits_of_the_single_operations(dtype, after, heads_normed, bias, sinks, turned, pieces, counts, bits, first16, seed):
    rng = np.random.default_rng(seed)
    parts = [block(rng, dtype, after=after, heads_normed=heads_normed, bias=bias, sinks=sinks, pieces=pieces) for _ in range(2)]
    joined = blocks(parts, HIDDEN, DTYPES[dtype])
    sealed = [sealed_pages(rng, dtype, bits) for _ in parts]
    first = [[random(rng, (KV, 1, *shape), dtype) for shape in ((DIM, 64), (64, DIM))] if first16 else [] for _ in parts]
    open, open_alone, past = open_pages(2, dtype), open_pages(2, dtype), 0
    for count in counts:
        x = random(rng, (count, HIDDEN), dtype)
        numbers = [~page if first16 and page == 0 else page for page in range(past // 64)]
        plan = kernels_cpu.attention_plan([(0, 0, count, past, 0, numbers)])
        rotation = kernels_cpu.rotation([([0.3] * (DIM // 2), past, count)]) if turned else None
        after = run_blocks(x, joined, sealed, open, [plan] * 2, [rotation] * 2, [bits] * 2, first)
        got, full, full_first = after.rows, after.filled, after.first
        mx.eval(got, full, full_first)
        want = x
        for i, part in enumerate(parts):
            pages = {"sealed": sealed[i], "first": first[i], "k_bits": bits[0], "v_bits": bits[1]}
            want, open_alone[i], full_alone = one_by_one(want, part, open_alone[i], plan=plan, rotation=rotation, **pages)
            mx.eval(want, open_alone[i], full_alone)
            assert [raw(a) for a in full[i] + full_first[i]] == [raw(a) for a in full_alone if plan.full_pages]
            assert [raw(a) for a in open[i]] == [raw(a) for a in open_alone[i]]
        assert got.dtype == DTYPES[dtype]
        assert raw(got) == raw(want)
        past += count


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def turned_by(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Heads `[T, heads, n]`, whose pairs (i, i + n / 2) are turned."""
    low, high = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("apart", [True, False])
def test_heads_whose_first_channels_are_still(apart, bits):
    """Norms of these alone, values in the keys, a gain of queries; and queries that read the same pages again: against float64."""
    heads, still, turned, rng = 3, 32, 10, np.random.default_rng(2)
    dim, rows = still + turned, 70
    weights, gain = rng.uniform(0.5, 1.5, (2, still)).astype(np.float32), rng.uniform(0.5, 1.5, dim).astype(np.float32)
    program = kernels_cpu.Program(2 * heads * dim + dim, mx.float32)
    stream, at = program.stream, 0
    q, again, k = (stream.columns(start, count) for start, count in ((0, heads * dim), (heads * dim, heads * dim), (2 * heads * dim, dim)))
    parts = {"still": still, "query_gain": mx.array(gain), "scale": SCALE, "query_norm": (mx.array(weights[0]), EPS)}
    where = {"step": still, "turned": q.columns(heads * still, heads * turned), "turned_step": turned} if apart else {"step": dim}
    norms = {"key_norm": (mx.array(weights[1]), EPS), "value_norm": (mx.array(weights[1]), EPS)}
    answers = program.attend(q.columns(0, heads * still) if apart else q, k, k.columns(0, still), heads * still, **where, **parts, **norms)
    program.add(answers, stream.columns(0, heads * still))
    answers = program.attend(again, None, None, heads * still, step=dim, source=0, **parts)
    program.add(answers, stream.columns(heads * dim, heads * still))
    x = rng.standard_normal((rows, 2 * heads * dim + dim)).astype(np.float32)
    plan, frequencies = kernels_cpu.attention_plan([(0, 0, rows, 0, 0, [])]), [0.7, 0.3, 0.2, 0.1, 0.0]
    pages = [mx.zeros((1, 1, 64, size)) for size in (dim, still)]
    sealed = [a[:, :0] for a in seal_keys(mx.zeros((1, 1, 64, dim)), bits) + seal_values(mx.zeros((1, 1, 64, still)), bits)]
    both = [[sealed] * 2, [pages] * 2, [plan] * 2, [kernels_cpu.rotation([(frequencies, 0, rows)])] * 2, [(bits, bits)] * 2]
    after = run_blocks(mx.array(x), program.finish(), *both, again=[False, True])
    mx.eval(after.rows, after.filled)
    assert [len(pages) for pages in after.filled] == [len(sealed), 0]
    angles = np.arange(rows)[:, None] * np.array(frequencies)

    def head(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.concatenate([normed(x[..., :still], weight), turned_by(x[..., still:], angles)], axis=-1)

    first = x[:, : heads * dim].astype(np.float64)
    cut = [first[:, : heads * still].reshape(rows, heads, still), first[:, heads * still :].reshape(rows, heads, turned)]
    first = np.concatenate(cut, axis=-1) if apart else first.reshape(rows, heads, dim)
    keys = head(x[:, None, 2 * heads * dim :].astype(np.float64), weights[1])[:, 0]
    for at, queries in ((0, first), (heads * dim, x[:, heads * dim : 2 * heads * dim].reshape(rows, heads, dim))):
        scores = np.einsum("qhd,kd->hqk", head(queries, weights[0]) * gain, keys) * SCALE
        scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        want = np.einsum("hqk,kd->qhd", shares / shares.sum(-1, keepdims=True), keys[:, :still])
        seen = slice(0, 64) if bits != 16 else slice(None)  # rows whose own page is not sealed see it as it came
        got = np.array(after.rows)[seen, at : at + heads * still].reshape(-1, heads, still)
        np.testing.assert_allclose(got, want[seen], atol=2e-5)


def plain() -> Block:
    return block(np.random.default_rng(0), "float32", after=False, heads_normed=False, bias=False, sinks=False, pieces=1)


def test_the_graph_holds_no_reference_to_python_objects():
    joined, pages = blocks([plain()], HIDDEN, mx.float32), open_pages(2, "float32")
    plan, rotation = kernels_cpu.attention_plan([(0, 0, 1, 0, 0, [])]), kernels_cpu.rotation([([1.0], 0, 1)])
    held = (joined, plan, rotation, *pages[0])
    before = [sys.getrefcount(a) for a in held]
    graph = run_blocks(mx.zeros((1, HIDDEN)), joined, [no_pages()], pages[:1], [plan], [rotation])
    assert [sys.getrefcount(a) for a in held] == before
    mx.eval(graph.rows)


WRONG = projection(np.random.default_rng(1), 32, HIDDEN, "float32", False) if kernels_cpu.available() else None


@pytest.mark.parametrize(
    "change",
    [
        {"qkv": []},
        {"output": WRONG},
        {"gate_up": WRONG},
        {"down": WRONG},
        {"before_mlp": (mx.ones((HIDDEN + 1,)), EPS)},
        {"after_mlp": (mx.ones((1, HIDDEN)), EPS)},
    ],
)
def test_blocks_that_do_not_fit_together_are_refused(change):
    with pytest.raises(ValueError, match="blocks"):
        blocks([replace(plain(), **change)], HIDDEN, mx.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"x": mx.zeros((1, HIDDEN + 1))},
        {"x": mx.zeros((1, HIDDEN), mx.float16)},
        {"x": mx.zeros((2, HIDDEN))},
        {"sealed": []},
        {"bits": []},
        {"bits": [(4, 16)]},
        {"bits": [(16, 7)]},
        {"first": [[], []]},
        {"first": [[mx.zeros((KV, 0, DIM, 64))]]},
        {"open": [[mx.zeros((1, KV, 64, DIM))]]},
        {"open": [[mx.zeros((1, KV + 1, 64, DIM))] * 2]},
        {"open": [[mx.zeros((1, KV, DIM, 64)).swapaxes(2, 3)] * 2]},
        {"rotations": []},
        {"rotations": [kernels_cpu.rotation([([1.0], 0, 2)])] if kernels_cpu.available() else []},
    ],
)
def test_steps_that_do_not_fit_the_blocks_are_refused(change):
    arguments = {
        "x": mx.zeros((1, HIDDEN)),
        "blocks": blocks([plain()], HIDDEN, mx.float32),
        "sealed": [no_pages()],
        "open": open_pages(1, "float32"),
        "plans": [kernels_cpu.attention_plan([(0, 0, 1, 0, 0, [])])],
        "rotations": [None],
    }
    with pytest.raises(ValueError, match="blocks"):
        run_blocks(**arguments | change)
