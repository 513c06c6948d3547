"""The sampler against numpy, and the independence of its rows."""

import re
import shutil
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.emulated import emulated, needs_emulator
from support.processes.examples import examples

from mlxinfer import SamplingParams
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.kernel_trial import SWITCH
from mlxinfer.sampling import Drafts, KeptNoise, SamplingBatch, sample_seed, sampler
from mlxinfer.sampling import top_k_top_p as cuts
from mlxinfer.sampling.top_k_top_p import Cuts

VOCAB = 61


@dataclass
class Row:
    """A `SampledSequence`."""

    params: SamplingParams
    seed: int
    prompt: list[int]
    answer: list[int]
    pending_token: mx.array | None = None


def logits_of(rows: int, seed: int = 0) -> mx.array:
    return mx.array((np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 2).astype(np.float32))


def choose(params: list[SamplingParams], logits: mx.array, seeds: list[int], position: int = 5) -> list[int]:
    batch = SamplingBatch([Row(p, s, [1, 2], []) for p, s in zip(params, seeds, strict=True)], logits.shape[-1])
    return batch.sample(logits, [position] * len(params)).tokens.tolist()


@pytest.mark.smoke
def test_temperature_zero_is_the_argmax_whatever_else_is_set():
    logits = logits_of(4)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_k=2),
        SamplingParams(),
        SamplingParams(temperature=0, seed=3),
    ]
    expected = np.argmax(np.array(logits), axis=-1)
    got = choose(params, logits, [1, 2, 3, 4])
    assert [got[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


def test_samples_follow_the_softmax():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = mx.broadcast_to(mx.array(np.log(probabilities).astype(np.float32)), (4000, 4))
    params = [SamplingParams()] * 4000
    counts = np.bincount(choose(params, logits, [sample_seed(9, i) for i in range(4000)]), minlength=4)
    assert np.abs(counts / 4000 - probabilities).max() < 0.025


def test_temperature_sharpens_and_flattens():
    logits = mx.broadcast_to(mx.array([1.0, 0.0]), (2000, 2))
    seeds = [sample_seed(1, i) for i in range(2000)]
    share = [np.mean(np.array(choose([SamplingParams(temperature=t)] * 2000, logits, seeds)) == 0) for t in (0.5, 1.0, 4.0)]
    expected = [1 / (1 + np.exp(-1 / t)) for t in (0.5, 1.0, 4.0)]
    np.testing.assert_allclose(share, expected, atol=0.03)


def reference_cut(row: np.ndarray, p: SamplingParams) -> set[int]:
    order = np.argsort(-row, kind="stable")
    kept = order[: p.top_k] if p.top_k > 0 else order
    weights = np.exp(row[kept] - row[kept].max())
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    kept = kept[before < p.top_p] if p.top_p < 1 else kept
    return {int(t) for t in kept if row[t] >= row.max() + np.log(p.min_p)} if p.min_p > 0 else {int(t) for t in kept}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            top_k=st.integers(-1, VOCAB + 3),
            top_p=st.floats(0.0625, 1.0),
            min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 1000),
)
def test_cuts_keep_what_numpy_keeps(params, seed):
    logits = logits_of(len(params), seed)
    made = Cuts.of(params, VOCAB)
    kept = np.array(mx.full(logits.shape, True) if made is None else logits >= made.threshold(logits))
    for row, p in enumerate(params):
        wanted = reference_cut(np.array(logits[row], dtype=np.float64), p)
        difference = set(np.flatnonzero(kept[row]).tolist()) ^ wanted
        assert len(difference) <= 1, "float32 may place one token on the other side of top_p"
        assert int(np.argmax(np.array(logits[row]))) in np.flatnonzero(kept[row])


def test_rows_do_not_see_their_neighbours():
    logits = logits_of(5)
    params = [
        SamplingParams(temperature=0.9, top_k=7),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.8, frequency_penalty=0.4),
        SamplingParams(min_p=0.1, logit_bias={3: 4.0}),
        SamplingParams(temperature=1.3, repetition_penalty=1.3),
    ]
    seeds = [11, 22, 33, 44, 55]
    together = choose(params, logits, seeds)
    alone = [choose([params[i]], logits[i : i + 1], [seeds[i]])[0] for i in range(5)]
    backwards = choose(params[::-1], logits[::-1], seeds[::-1])[::-1]
    assert together == alone == backwards


def test_seed_and_position_decide_the_noise():
    flat = mx.zeros((1, 5000))
    same = choose([SamplingParams()], flat, [7])
    assert choose([SamplingParams()], flat, [7]) == same
    assert choose([SamplingParams()], flat, [8]) != same
    assert choose([SamplingParams()], flat, [7], position=6) != same
    assert len({sample_seed(1, i) for i in range(1000)} | {sample_seed(2, i) for i in range(1000)}) == 2000


def test_penalties_match_numpy_and_count_device_tokens():
    logits = logits_of(2, 4)
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.25),
        SamplingParams(temperature=0),
    ]
    rows = [Row(params[0], 0, [4, 5], [6, 6, 7], pending_token=mx.array([8])), Row(params[1], 0, [4], [])]
    batch = SamplingBatch(rows, VOCAB)
    assert batch._penalties is not None
    got = np.array(batch._penalties.apply(logits))
    want = np.array(logits, dtype=np.float64)
    for token in (4, 5, 6, 7, 8):
        want[0, token] = want[0, token] / 1.7 if want[0, token] > 0 else want[0, token] * 1.7
    for token, count in ((6, 2), (7, 1), (8, 1)):
        want[0, token] -= 0.6 + 0.25 * count
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_repeated_token_is_worn_down():
    logits = mx.array([[2.0, 1.9, 0.0]])
    batch = SamplingBatch([Row(SamplingParams(temperature=0, frequency_penalty=0.2), 0, [2], [])], 3)
    assert [batch.sample(logits, [i]).tokens.item() for i in range(4)] == [0, 1, 0, 1]


def test_bias_moves_the_choice():
    logits = logits_of(2)
    params = [SamplingParams(temperature=0, logit_bias={17: 100.0}), SamplingParams(temperature=0)]
    assert choose(params, logits, [0, 0]) == [17, int(np.argmax(np.array(logits[1])))]


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB])
def test_logprobs_are_those_of_the_plain_logits(k):
    logits = logits_of(3, 8)
    params = [SamplingParams(temperature=0.3, logprobs=k, logit_bias={2: -50.0})] * 3
    sampled = SamplingBatch([Row(p, i, [1], []) for i, p in enumerate(params)], VOCAB).sample(logits, [1, 1, 1])
    exact = np.array(logits, dtype=np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    chosen = np.array(sampled.tokens)
    np.testing.assert_allclose(np.array(sampled.logprobs.chosen), exact[np.arange(3), chosen], atol=1e-5)
    np.testing.assert_array_equal(np.array(sampled.logprobs.top_ids), np.argsort(-exact, axis=-1)[:, :k])
    np.testing.assert_allclose(np.array(sampled.logprobs.top), -np.sort(-exact, axis=-1)[:, :k], atol=1e-5)


@pytest.mark.parametrize("drafted", [False, True])
def test_rows_in_slices_get_what_they_get_together(drafted, monkeypatch):
    """More rows than are sampled at once, with every stage, with and without drafts."""
    ways = [
        {"temperature": 0.9, "top_k": 7},
        {"temperature": 0},
        {"top_p": 0.8, "frequency_penalty": 0.4, "temperature": 1.1},
        {"min_p": 0.1, "logit_bias": {3: 4.0}, "temperature": 0.7},
        {"repetition_penalty": 1.3, "temperature": 1.3, "logprobs": 2},
    ]
    rows = [Row(SamplingParams(**ways[i % 5]), 100 + i, [1, i], [2, i + 1]) for i in range(11)]
    counts = [i % 4 if drafted else 0 for i in range(11)]
    drafts = Drafts(counts, mx.array(np.random.default_rng(1).integers(0, VOCAB, sum(counts)).astype(np.uint32))) if drafted else None
    logits = logits_of(11 + sum(counts))
    found = []
    for at_once in (3, 100):
        monkeypatch.setattr(sampler, "SAMPLED_ROWS_AT_ONCE", at_once)
        batch = SamplingBatch(rows, VOCAB)
        steps = [batch.sample(logits, list(range(5, 16)), drafts), batch.sample(logits[:11], list(range(6, 17)))]
        found.append([(step.tokens.tolist(), step.logprobs.read()) for step in steps])
    assert found[0] == found[1]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The choice of kernels as it is made there; they run in the emulator."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(cuts.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    cuts.TRIAL.forget()
    yield
    cuts.TRIAL.forget()


@needs_emulator
def test_a_gpu_searches_instead_of_sorting(on_a_gpu, monkeypatch):
    """The same tokens, and no sort in the graph."""
    logits = mx.array((np.random.default_rng(2).standard_normal((3, 2000)) * 3).astype(np.float32))
    params = [SamplingParams(temperature=0.9, top_k=20, top_p=0.9), SamplingParams(top_p=0.7, temperature=1.2), SamplingParams(min_p=0.05)]
    with emulated():
        assert cuts.TRIAL.obstacle(2000) is None
        monkeypatch.setattr(mx, "sort", None)
        searched = [choose(params, logits, [1, 2, 3], position) for position in range(8)]
        drafts = Drafts([1, 0, 2], mx.array([3, 4, 5], mx.uint32))
        rows = [Row(p, s, [1, 2], []) for p, s in zip(params, (1, 2, 3), strict=True)]
        drafted = SamplingBatch(rows, 2000).sample(logits[mx.array([0, 0, 1, 2, 2, 2])], [5] * 3, drafts).tokens.tolist()
    monkeypatch.undo()
    assert searched == [choose(params, logits, [1, 2, 3], position) for position in range(8)]
    assert drafted == SamplingBatch(rows, 2000).sample(logits[mx.array([0, 0, 1, 2, 2, 2])], [5] * 3, drafts).tokens.tolist()


@needs_emulator
@pytest.mark.parametrize("size", [49152, 151936])
def test_rounding_of_the_sorted_sums_is_no_fault(size, on_a_gpu):
    """MLX's sums of so many sorted probabilities differ by dozens of tokens, where the kernel's are exact."""
    with emulated():
        assert cuts.TRIAL.obstacle(size) is None


@pytest.mark.parametrize("wrong", ["crash", "answers"])
def test_a_search_that_fails_its_trial_is_not_used(wrong, on_a_gpu):
    def broken(**_):
        def call(*, output_shapes, output_dtypes, **_):
            if wrong == "crash":
                raise RuntimeError("Unable to build metal library from source")
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    with run_with(broken):
        assert "failed its trial" in cuts.TRIAL.obstacle(2000)
        assert choose([SamplingParams(top_k=1)], mx.arange(2000).astype(mx.float32)[None], [4]) == [1999]
    assert "61 logits" in cuts.TRIAL.obstacle(VOCAB)


@pytest.fixture
def compiling():
    """MLX fuses, as it does for users."""
    mx.enable_compile()
    yield
    if not mx.metal.is_available():
        mx.disable_compile()


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on a CPU")
def test_noise_and_cuts_are_one_kernel_on_a_gpu(tmp_path, compiling):
    """Next to the random bits themselves, and the width of a range, one number that nothing waits for; and the noise is the same."""
    logits, lowest, keys = logits_of(3), mx.array([[0.5], [-mx.inf], [-1.0]]), sampler.row_keys([1, 2, 3], [4, 5, 6])
    mx.eval(logits, lowest, keys)
    plain, compiled = sampler.cut_and_noisy, mx.compile(sampler.cut_and_noisy)
    np.testing.assert_allclose(np.array(compiled(logits, lowest, keys)), np.array(plain(logits, lowest, keys)), rtol=1e-5, atol=1e-5)
    mx.export_to_dot(str(tmp_path / "graph.dot"), compiled(logits, lowest, keys))
    found = re.findall(r'label ?="(\w+)"', (tmp_path / "graph.dot").read_text())
    launched = sorted(name[:8] for name in found if name not in ("Broadcast", "Reshape", "Full"))
    assert launched == ["Compiled", "RandomBi", "Subtract"], found


def test_kept_noise_is_what_is_drawn_without_it():
    rows = [3, 3, 5, 8], [7, 8, 7, 9]
    plain = np.array(sampler.gumbel(sampler.row_keys(*rows), 50))
    kept = KeptNoise()
    np.testing.assert_array_equal(np.array(kept.draw([3, 8], [8, 9], 50)), plain[[1, 3]])
    np.testing.assert_array_equal(np.array(kept.take([3, 8], [8, 9], 49)), np.array(sampler.gumbel(sampler.row_keys([3, 8], [8, 9]), 49)))
    np.testing.assert_array_equal(np.array(kept.take(*rows, 50)), plain)  # two of them kept
    np.testing.assert_array_equal(np.array(kept.take(*rows, 50)), plain)  # and none any more
    kept.draw(*rows, 50)
    np.testing.assert_array_equal(np.array(kept.take(*rows, 50)), plain)
    for at in range(200):
        kept.draw([1], [at], 50)
    assert len(kept._kept) <= 32
    many = list(range(40)), [5] * 40
    np.testing.assert_array_equal(np.array(kept.draw(*many, 50)), np.array(sampler.gumbel(sampler.row_keys(*many), 50)))
    assert len(kept._kept) <= 32
