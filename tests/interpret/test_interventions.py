"""Traces and interventions inside an engine: chunks, batches, quantized caches, prefixes, threads, and what a caller gets wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.cache.base import Segment
from mlxinfer.errors import SettingError
from mlxinfer.interpret import Trace
from mlxinfer.interpret.recorder import Recorder

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
IDS = np.random.default_rng(5).integers(1, 90, 150).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
EVERYTHING = ("residual", "attention", "attention_out", "heads", "mlp", "kv", "logits")


@pytest.fixture(scope="module")
def llm():
    with LLM(GOLDEN / "qwen3", dtype="float32") as opened:
        yield opened


@pytest.fixture(scope="module")
def vector(llm):
    return np.random.default_rng(1).normal(size=llm.config["hidden_size"]).astype(np.float32)


def test_a_trace_has_what_was_asked_for_in_its_shapes(llm):
    trace, config = llm.trace(IDS, what=EVERYTHING), llm.config
    layers, hidden, heads, kv = (config[n] for n in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"))
    count, dim = len(IDS), config["head_dim"]
    assert list(trace) == list(EVERYTHING)
    assert len(trace) == count == len(trace.tokens)
    assert [x.shape for x in trace["residual"].values()] == [(count, hidden)] * (layers + 1)
    assert [x.shape for x in trace["mlp"].values()] == [x.shape for x in trace["attention_out"].values()] == [(count, hidden)] * layers
    assert [x.shape for x in trace["heads"].values()] == [(heads, count, dim)] * layers
    assert [x.shape for x in trace["attention"].values()] == [(heads, count, count)] * layers
    assert [(k.shape, v.shape) for k, v in trace["kv"].values()] == [((count, kv, dim), (count, kv, dim))] * layers
    assert trace["logits"].shape == (count, config["vocab_size"])
    assert mx.allclose(trace["logits"], llm.logits(IDS), atol=1e-4)
    assert mx.allclose(trace["attention"][1].sum(axis=-1), mx.ones((heads, count)), atol=1e-5)


def test_chunks_change_nothing():
    with LLM(GOLDEN / "gemma2", dtype="float32") as whole:
        expected = whole.trace(IDS, what=EVERYTHING)
    with LLM(GOLDEN / "gemma2", dtype="float32", max_step_s=1e-9) as chunked:  # as few tokens a step as there may be
        found = chunked.trace(IDS, what=EVERYTHING)
        assert chunked.stats().steps > 1
    for place in EVERYTHING[:-2]:
        for layer, values in expected[place].items():
            assert mx.allclose(found[place][layer], values, atol=1e-4), (place, layer)


def test_one_layer_only(llm):
    trace = llm.trace(IDS[:9], layers=[1], what=["residual", "mlp"])
    assert list(trace["residual"]) == [1] == list(trace["mlp"])
    with pytest.raises(SettingError, match=r"has no 'logits', but residual, mlp: ask for it with trace\(..., what=\['logits'\]\)"):
        trace["logits"]
    with pytest.raises(SettingError, match="the stream that leaves the last layer"):
        trace.logit_lens()


def test_what_is_read_off_a_trace(llm):
    trace = llm.trace(IDS, what=["residual", "attention_out", "mlp", "logits"])
    logits = np.array(trace["logits"], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.allclose(np.array(trace.surprisal()), -logprobs[np.arange(len(IDS) - 1), IDS[1:]], atol=1e-4)
    assert np.allclose(np.array(trace.entropy()), -(np.exp(logprobs) * logprobs).sum(-1), atol=1e-4)
    assert np.allclose(np.array(trace.residual_norms())[1], np.linalg.norm(np.array(trace["residual"][1]), axis=-1), atol=1e-4)

    lens = trace.logit_lens()
    assert lens.layers == tuple(range(llm.config["num_hidden_layers"] + 1))
    assert np.array_equal(np.array(lens.token_ids[-1]), logits.argmax(-1))
    assert np.allclose(np.array(lens.probability[-1]), np.exp(logprobs.max(-1)), atol=1e-4)
    assert np.array_equal(np.array(lens.probability[-1]), np.array(lens.final_probability[-1]))

    shares = trace.attribution(token=7, position=40)
    assert len(shares) == 1 + 2 * llm.config["num_hidden_layers"]
    assert sum(shares.values()) == pytest.approx(logits[40, 7], abs=1e-3)


def test_an_intervention_holds_for_its_requests_only(llm, vector):
    free = [c.token_ids for c in llm.generate([IDS, IDS[:20]], GREEDY)]
    with llm.steer(1, vector, 4.0):
        inside = llm.stream(IDS, GREEDY)
        steered = llm.generate([IDS, IDS[:20]], GREEDY)
    outside = llm.stream(IDS, GREEDY)
    found: dict[str, list[int]] = {"in": [], "out": []}
    for _ in range(GREEDY.max_tokens):  # both in every step
        found["in"] += next(inside).token_ids
        found["out"] += next(outside).token_ids
    assert found == {"in": steered[0].token_ids, "out": free[0]}
    assert steered[0].token_ids != free[0]
    assert steered[0].usage.stats.reused_tokens == 0
    again = llm.generate([IDS, IDS[:20]], GREEDY)
    assert [c.token_ids for c in again] == free
    assert again[0].usage.stats.reused_tokens > 0


def test_samples_fork_with_their_intervention(llm, vector):
    with llm.steer(1, vector, 4.0):
        (alone,) = llm.generate(IDS, GREEDY)
        several = llm.generate(IDS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=3))
    assert [c.token_ids for c in several] == [alone.token_ids] * 3


def test_a_quantized_cache_and_drafts_are_steered_alike(vector):
    with LLM(GOLDEN / "qwen3", dtype="float32", kv="4") as quantized:
        prompt = IDS[:20] * 5  # which repeats: drafts are found in it
        with quantized.steer(1, vector, 4.0):
            steered = quantized.generate(prompt, GREEDY)[0].token_ids
            logits = np.array(quantized.logits(prompt + steered))
        with LLM(GOLDEN / "qwen3", dtype="float32", kv="4", speculate=False) as plain, plain.steer(1, vector, 4.0):
            assert plain.generate(prompt, GREEDY)[0].token_ids == steered
    assert logits.shape == (len(prompt) + 12, 96) or logits.shape[0] == len(prompt) + 12


def test_interventions_add_up_and_a_trace_sees_them(llm, vector):
    plain = llm.trace(IDS, what=["residual", "mlp"])
    with llm.steer(0, vector), llm.steer(0, vector, 2.0), llm.ablate("mlp", 1, positions=[3]):
        trace = llm.trace(IDS, what=["residual", "mlp"])
    assert mx.allclose(trace["residual"][0], plain["residual"][0] + 3 * mx.array(vector), atol=1e-4)
    assert not trace["mlp"][1][3].any().item()
    assert trace["mlp"][1][4].any().item()


def test_heads_are_ablated_one_by_one_and_by_their_mean(llm):
    trace = llm.trace(IDS, what="heads")
    with llm.ablate("heads", 0, heads=[1]):
        without = llm.trace(IDS, layers=0, what="heads")["heads"][0]
    assert not without[1].any().item()
    assert mx.array_equal(without[0], trace["heads"][0][0])
    with llm.ablate("heads", 0, heads=[1], mean=trace):
        mean = llm.trace(IDS, layers=0, what="heads")["heads"][0]
    assert mx.allclose(mean[1], mx.broadcast_to(trace["heads"][0][1].mean(axis=0), mean[1].shape), atol=1e-6)


def test_patching_everything_gives_the_other_prompts_answer(llm):
    other = IDS[::-1]
    source = llm.trace(other, what=["residual", "logits"])
    with llm.patch(source, layer=len(source["residual"]) - 1):
        assert mx.allclose(llm.logits(IDS), source["logits"], atol=1e-4)


def test_another_thread_is_not_concerned(llm, vector):
    found = []
    expected = llm.generate(IDS, GREEDY)[0].token_ids
    with llm.steer(1, vector, 4.0):
        thread = Thread(target=lambda: found.append(llm.generate(IDS, GREEDY)[0].token_ids))
        thread.start()
        thread.join()
    assert found == [expected]


def test_an_exception_inside_leaves_nothing_behind(llm, vector):
    expected = llm.generate(IDS, GREEDY)[0].token_ids
    with pytest.raises(ZeroDivisionError), llm.steer(1, vector, 4.0):
        _ = 1 / 0
    assert llm.generate(IDS, GREEDY)[0].token_ids == expected


def test_async(llm, vector):
    async def ask() -> tuple[Trace, list[int], list[int]]:
        async with AsyncLLM(GOLDEN / "qwen3", dtype="float32") as shared:
            trace = await shared.trace(IDS, what=["residual", "logits"])

            async def steered() -> list[int]:
                with shared.steer(1, vector, 4.0):
                    return (await shared.generate(IDS, GREEDY))[0].token_ids

            async def free() -> list[int]:
                return (await shared.generate(IDS, GREEDY))[0].token_ids

            lens = trace.logit_lens()
            assert lens.layers[-1] == len(trace["residual"]) - 1
            return trace, *await asyncio.gather(steered(), free())

    trace, steered, free = asyncio.run(ask())
    assert free == llm.generate(IDS, GREEDY)[0].token_ids
    with llm.steer(1, vector, 4.0):
        assert steered == llm.generate(IDS, GREEDY)[0].token_ids
    assert mx.allclose(trace["logits"], llm.logits(IDS), atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.trace(IDS, what="residuals"), r"'residuals' is no part of a model: did you mean 'residual'\?"),
        (lambda llm: llm.trace(IDS, layers=99), r"layer 99 is not one of 0 to \d"),
        (lambda llm: llm.trace(IDS, what="router"), "none of these layers has experts"),
        (lambda llm: llm.steer(0, [1.0, 2.0]), r"has the shape \(\d+,\), not \(2,\)"),
        (lambda llm: llm.steer(0, "north"), "a steering vector is an array of numbers"),
        (lambda llm: llm.steer(0, np.full(llm.config["hidden_size"], np.nan)), "is not finite"),
        (lambda llm: llm.ablate("heads", 0, heads=[99]), "head 99 is not one of 0 to"),
        (lambda llm: llm.ablate("mlp", 0, heads=[0]), "heads are chosen with what='heads'"),
        (lambda llm: llm.ablate("logits", 0), "'logits' is no part of a model"),
        (lambda llm: llm.patch(llm.trace(IDS[:4], layers=0, what="mlp"), "mlp", 1), "the trace has no 'mlp' of layer 1"),
        (lambda llm: llm.patch(llm.trace(IDS[:4], what="mlp"), "mlp", positions={0: 9}), "position 9 is not one of the 4 that were traced"),
        (lambda llm: llm.trace(IDS[:1]).surprisal(), "a single token follows nothing"),
        (
            lambda llm: llm.trace(IDS, what=["residual", "mlp", "attention_out"]).attribution(token=10**6),
            "is not one of the model's token ids",
        ),
    ],
)
def test_what_a_caller_gets_wrong(llm, call, message):
    with pytest.raises(SettingError, match=message):
        call(llm)


def test_a_trace_that_would_not_fit_is_refused_before_it_is_computed(llm, monkeypatch):
    monkeypatch.setattr("mlxinfer.interpret.trace.MOST_BYTES", 100_000)
    steps = llm.stats().steps
    with pytest.raises(SettingError, match=r"a trace of 150 tokens would take 0\.\d GB, more than 0\.0: choose fewer layers"):
        llm.trace(IDS, what=EVERYTHING)
    assert llm.stats().steps == steps


def test_what_is_read_again_is_kept_once():
    """A sequence that gave its pages away begins anew: what was kept of it is replaced."""
    recorder = Recorder({"mlp": {0}})
    for value, past, count in ((1.0, 0, 3), (2.0, 3, 2), (3.0, 0, 4), (4.0, 4, 1)):
        recorder.at("mlp", 0, mx.full((count, 2), value), [Segment(0, 0, count, past, 5)])
    assert recorder.found("mlp", 0)[:, 0].tolist() == [3.0] * 4 + [4.0]
