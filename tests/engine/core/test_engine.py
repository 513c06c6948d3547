"""The engine with a tiny real model: results do not depend on the schedule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.tiny_engine import GOLDEN, all_logits, greedy, request, run, tiny_engine
from support.processes.examples import examples

from mlxinfer.errors import MemoryPlanError

rng = np.random.default_rng(3)
PROMPTS = [rng.integers(3, 96, n).tolist() for n in (1, 5, 63, 64, 65, 130)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_is_that_of_plain_recomputation(prompt):
    engine = tiny_engine()
    assert run(engine, [request(prompt, limit=12)]) == [greedy(prompt, 12)]


@pytest.mark.smoke
def test_batch_gives_each_what_it_has_alone():
    params = [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 1.0, "top_k": 9, "seed": 5}, {"top_p": 0.7, "temperature": 1.2}]
    params += [{"frequency_penalty": 0.7, "repetition_penalty": 1.2}, {"temperature": 0.5, "presence_penalty": 1.0, "seed": 8}]
    limits = [70, 3, 40, 12, 25, 66]
    alone = [run(tiny_engine(), [request(p, n, **v)])[0] for p, n, v in zip(PROMPTS, limits, params, strict=True)]
    together = run(tiny_engine(), [request(p, n, **v) for p, n, v in zip(PROMPTS, limits, params, strict=True)])
    assert together == alone
    assert [len(a) for a in together] == limits


@settings(max_examples=examples(12), deadline=None)
@given(
    chunk=st.integers(1, 200),
    slots=st.integers(1, 4),
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=5),
)
def test_any_arrival_and_chunk_size_gives_the_same_tokens(chunk, slots, arrivals):
    engine = tiny_engine(max_num_batched_tokens=chunk, max_num_seqs=min(slots, chunk))
    sequences = []
    for which, wait, limit in arrivals:
        for _ in range(wait):
            engine.step()
        sequences.append(request(PROMPTS[which], limit, frequency_penalty=0.3))
        engine.add(sequences[-1])
    while not engine.idle:
        engine.step()
    for sequence, (which, _, limit) in zip(sequences, arrivals, strict=True):
        assert sequence.finish_reason == "length"
        assert sequence.answer == expected(which)[:limit]


def expected(which: int, known: dict[int, list[int]] = {}) -> list[int]:  # noqa: B006
    if which not in known:
        known[which] = run(tiny_engine(), [request(PROMPTS[which], 9, frequency_penalty=0.3)])[0]
    return known[which]


@pytest.mark.parametrize("chunk", [1, 17, 64, 500])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "phi3_longrope", "gemma4_text_shared", "falcon_h1"])
def test_logits_through_the_engine_are_those_of_transformers(name, chunk):
    """One model of each kind of cache; tests/families has all families, over the same pages."""
    reference = np.load(GOLDEN / name / "reference.npz")
    got = all_logits(tiny_engine(name, max_num_batched_tokens=chunk, max_num_seqs=1), reference["ids"].tolist())
    assert np.abs(got - reference["logits"]).max() < 2e-3


def test_samples_of_one_prompt_fork_and_are_those_of_separate_requests():
    def group(n):
        leader, *rest = [request(PROMPTS[4], 8, index=i, temperature=1.0, seed=12) for i in range(n)]
        leader.lead(rest)
        return leader, [leader, *rest]

    separate = [run(tiny_engine(), [request(PROMPTS[4], 8, index=i, temperature=1.0, seed=12)])[0] for i in range(5)]
    for slots in (8, 2, 1):
        engine = tiny_engine(max_num_seqs=slots)
        leader, everyone = group(5)
        run(engine, [leader])
        assert [s.answer for s in everyone] == separate
    assert len({tuple(a) for a in separate}) > 1


def test_stop_tokens_end_a_sequence_and_count():
    answer = greedy(PROMPTS[1], 12)
    sequence = request(PROMPTS[1], 12, stop_ids={answer[4]})
    run(tiny_engine(), [sequence])
    assert sequence.finish_reason == "stop"
    assert sequence.answer == answer[: answer.index(answer[4]) + 1]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 7])
def test_aborting_frees_everything_and_harms_nobody(after):
    engine = tiny_engine()
    victim, other = request(PROMPTS[5], 30), request(PROMPTS[2], 20)
    engine.add(victim)
    engine.add(other)
    for _ in range(after):
        engine.step()
    engine.abort(victim)
    assert victim.finish_reason == "cancelled"
    while not engine.idle:
        engine.step()
    assert other.answer == greedy(PROMPTS[2], 20)
    assert engine.cache.usage().used == 0
    assert not engine.cache.pool.slots


@pytest.mark.parametrize("which", ["leader", "sample"])
@pytest.mark.parametrize("after", range(8))
def test_aborting_at_any_step_around_the_fork_leaves_nothing_behind(after, which):
    engine = tiny_engine(max_num_batched_tokens=40, max_draft=0)
    leader, sample = (request(PROMPTS[4], 4, index=index, temperature=1.0) for index in range(2))
    leader.lead([sample])
    other = request(PROMPTS[1], 12)
    for sequence in (other, leader):
        engine.add(sequence)
    for _ in range(after):
        engine.step()
    engine.abort(leader if which == "leader" else sample)
    for _ in range(30):
        engine.step()
    assert engine.idle
    assert not engine.cache.pool.slots
    assert other.answer == greedy(PROMPTS[1], 12)
    assert (leader.finish_reason, len(leader.answer)) == ("length", 4) or which == "leader"


def test_an_interrupt_inside_a_step_leaves_a_fresh_engine(monkeypatch):
    engine = tiny_engine()
    sequence = request(PROMPTS[3], 30)
    engine.add(sequence)
    for _ in range(4):
        engine.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.__class__, "hidden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert sequence.finish_reason == "cancelled"
    assert engine.idle
    assert run(engine, [request(PROMPTS[1], 6)]) == [greedy(PROMPTS[1], 6)]


@pytest.mark.long
def test_what_can_never_fit_is_refused_and_what_can_waits():
    engine = tiny_engine(kv_cache_tokens=256)
    with pytest.raises(MemoryPlanError, match="does not fit"):
        engine.add(request(PROMPTS[5], 400))
    sequences = [request(PROMPTS[5], 60) for _ in range(4)]
    answers = run(engine, sequences)
    assert answers == [answers[0]] * 4
    assert answers[0] == greedy(PROMPTS[5], 60)


def test_logprobs_come_with_the_tokens():
    engine = tiny_engine()
    engine.add(request(PROMPTS[1], 5, logprobs=3))
    engine.add(request(PROMPTS[2], 5))
    events = []
    while not engine.idle:
        events += engine.step()
    with_logprobs = [e for e in events if e.logprob is not None]
    assert len(with_logprobs) == 5
    for event in with_logprobs:
        assert len(event.top) == 3
        assert event.top[0] == (event.token_id, pytest.approx(event.logprob))


def test_longrope_answers_cross_the_boundary_as_if_recomputed():
    """transformers computes the whole sequence anew, with the long factors, when it outgrows the short ones."""
    prompt = PROMPTS[5][:28]
    assert run(tiny_engine("phi3_longrope"), [request(prompt, 12)]) == [greedy(prompt, 12, "phi3_longrope")]
