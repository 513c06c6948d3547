"""Answers with and without drafts are the same, token for token."""

from functools import cache

import numpy as np
import pytest
from support.engines.drafting import Guesser, eager_engine, noisy_model
from support.engines.tiny_engine import request, run, tiny_engine, tiny_model

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.events import Token

rng = np.random.default_rng(5)
PROMPTS = [rng.integers(3, 96, n).tolist() for n in (2, 60, 63, 64, 130)] + [[7, 8, 9, 10] * 12]
SETTINGS = [
    {},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.0, "top_k": 9, "seed": 5, "logprobs": 3},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.5, "presence_penalty": 1.0, "seed": 8, "logit_bias": {5: 2.0}},
    {"temperature": 0.0, "logprobs": 2},
]
LIMITS = [90, 70, 80, 66, 40, 100]


def requests(most=100):
    return [request(p, min(n, most), **v) for p, n, v in zip(PROMPTS, LIMITS, SETTINGS, strict=True)]


@cache
def plain(name="llama", kv=None, most=100):
    return run(tiny_engine(name, kv, max_draft=0), requests(most))


@pytest.mark.long
@pytest.mark.parametrize("kv", [None, "4"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "mixtral", "llama_linear"))]
)
def test_drafts_right_and_wrong_change_nothing(name, kv):
    form = KVFormat.parse(kv) if kv else None
    if kv and name != "llama":
        pytest.skip("quantized pages are tried on one family")
    expected = plain(name, form, 55)
    engine = eager_engine(name, kv=form)
    Guesser(engine.proposer, dict(zip(map(tuple, PROMPTS), expected, strict=True)), 3)
    sequences = requests(55)
    assert run(engine, sequences) == expected
    # A short answer's few drafts may all be right, or wrong: how they fall depends on which steps it shares.
    assert 0 < sum(s.accepted_tokens for s in sequences) < sum(s.drafted_tokens for s in sequences)


def test_what_was_said_before_is_drafted():
    expected, sequences = plain(), requests()
    assert run(eager_engine(), sequences) == expected
    assert sequences[0].drafted_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("amount", "kv"),
    [
        (0.0, None),
        (0.05, "8"),
        (3.0, None),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((0.0, "8"), (0.05, None), (3.0, "8"))),
    ],
)
def test_a_draft_model_changes_nothing(amount, kv):
    form = KVFormat.parse(kv) if kv else None
    expected, sequences = plain(kv=form), requests()
    engine = eager_engine(draft=noisy_model(amount) if amount else tiny_model(), kv=form)
    assert run(engine, sequences) == expected
    drafted, accepted = sum(s.drafted_tokens for s in sequences), sum(s.accepted_tokens for s in sequences)
    assert drafted > 100
    assert accepted == drafted if amount == 0 else accepted < drafted
    assert accepted > 0.35 * drafted if amount < 1 else accepted < 0.3 * drafted
    usage = engine.proposer.draft.cache.usage()
    assert usage.used == 0


@pytest.mark.long
def test_a_draft_model_for_a_hybrid():
    expected, sequences = plain("qwen3_next"), requests()
    assert run(eager_engine("qwen3_next", draft=noisy_model(0.5)), sequences) == expected
    assert sum(s.drafted_tokens for s in sequences) > 100


def test_logprobs_under_drafts_are_those_without():
    def events(engine, params):
        engine.add(request(PROMPTS[5], 40, **params))
        found = []
        while not engine.idle:
            found += [(e.token_id, e.logprob, e.top) for e in engine.step() if isinstance(e, Token)]
        return found

    params = {"temperature": 0.7, "seed": 2, "logprobs": 3}
    without = events(tiny_engine(max_draft=0), params)
    under = events(eager_engine(draft=tiny_model()), params)
    assert [(t, [i for i, _ in top]) for t, _, top in under] == [(t, [i for i, _ in top]) for t, _, top in without]
    np.testing.assert_allclose([p for _, p, _ in under], [p for _, p, _ in without], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_stop_token_inside_drafts_ends_the_answer(name):
    answer = run(tiny_engine(name, max_draft=0), [request(PROMPTS[0], 60)])[0]
    for stop in sorted(set(answer))[:6]:
        engine = eager_engine(name)
        Guesser(engine.proposer, {tuple(PROMPTS[0]): answer}, stop)
        sequence = request(PROMPTS[0], 60, stop_ids={stop})
        again = request([*PROMPTS[0], *answer[:30]], 20)
        run(engine, [sequence])
        assert sequence.finish_reason == "stop"
        assert sequence.answer == answer[: answer.index(stop) + 1]
        assert sequence.num_tokens == len(sequence.tokens) > sequence.num_computed_tokens
        engine.proposer.max_draft = 0
        engine.proposer.__class__.propose(engine.proposer, [])
        del engine.proposer.propose
        assert run(engine, [again]) == [answer[30:50]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "after"),
    [
        pytest.param(model, after, marks=() if model == (after % 2 == 0) else pytest.mark.slow)
        for model in (True, False)
        for after in range(8)
    ],
)
def test_cancelling_between_drafts_harms_nobody(after, model):
    expected = plain()
    engine = eager_engine(draft=noisy_model(0.05) if model else None)
    sequences = requests(most=24)
    for s in sequences:
        engine.add(s)
    for _ in range(after):
        engine.step()
    engine.abort(sequences[0])
    while not engine.idle:
        engine.step()
    assert [s.answer for s in sequences[1:]] == [answer[:24] for answer in expected[1:]]
    assert engine.cache.usage().used == 0


@pytest.mark.long
def test_under_drafts_tokens_are_distributed_as_without():
    """Chi-square over many seeds: the second and third token, where the first is whatever came."""
    count = 1000
    prompts = [[5, 6, 7]] * count

    def sample(engine):
        sequences = [request(p, 3, index=i, temperature=1.0, top_k=4, seed=77) for i, p in enumerate(prompts)]
        return np.array(run(engine, sequences))

    drafting = eager_engine(draft=noisy_model(0.3), max_num_seqs=64, kv_cache_tokens=64 * 300)
    drafted = sample(drafting)
    shifted = [request(p, 3, index=i + count, temperature=1.0, top_k=4, seed=77) for i, p in enumerate(prompts)]
    other = np.array(run(tiny_engine(max_draft=0, max_num_seqs=64, kv_cache_tokens=64 * 300), shifted))
    for place in (1, 2):
        a, b = (np.bincount(x[:, place], minlength=96).astype(float) for x in (drafted, other))
        often = a + b > 20
        a, b = a[often], b[often]
        chi = ((a - b) ** 2 / (a + b)).sum()
        freedom = int(often.sum()) - 1
        assert chi < freedom + 4 * (2 * freedom) ** 0.5
