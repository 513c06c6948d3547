"""Draft heads in a running engine change no answer."""

from functools import cache

import numpy as np
import pytest
from support.engines.tiny_engine import request, run, tiny_engine
from support.models.heads import HEAD, OWN_HEADS, Prompter, engine_with, model_with_head

from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.spec_decode import proposer

rng = np.random.default_rng(5)
PROMPTS = [rng.integers(3, 96, n).tolist() for n in (2, 60, 63, 64, 130)]
SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.0, "top_k": 9, "seed": 5, "logprobs": 3},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 2},
]
LIMITS = [60, 50, 56, 48, 30]


def requests():
    return [request(p, n, **v) for p, n, v in zip(PROMPTS, LIMITS, SETTINGS, strict=True)]


@cache
def plain(name, kv="16"):
    return run(tiny_engine(name, KVFormat.parse(kv), max_draft=0), requests())


LONG, SLOW = {"marks": pytest.mark.long}, {"marks": pytest.mark.slow}
"""tests/families covers the slow cases too, with shorter answers."""


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("llama", "16"),
        pytest.param("llama", "4", **LONG),
        pytest.param("qwen3_next", "16", **LONG),
        pytest.param("gemma3_text", "16", **SLOW),
    ],
)
def test_a_head_changes_no_answer(name, kv):
    expected, sequences = plain(name, kv), requests()
    engine = engine_with(model_with_head(name, HEAD)[0], kv)
    Prompter(engine, dict(zip(map(tuple, PROMPTS), expected, strict=True)))
    assert run(engine, sequences) == expected
    drafted, accepted = sum(s.drafted_tokens for s in sequences), sum(s.accepted_tokens for s in sequences)
    assert drafted > 100
    assert 0.3 * drafted < accepted < 0.9 * drafted


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("glm4_moe_lite", **SLOW), pytest.param("nemotron_h", **SLOW)])
def test_the_head_of_a_checkpoint_changes_no_answer(name):
    few = [2, 1]
    expected = run(tiny_engine(name, max_draft=0), [requests()[i] for i in few])
    sequences = [requests()[i] for i in few]
    engine = engine_with(model_with_head(name, True, **OWN_HEADS[name])[0])
    Prompter(engine, {tuple(PROMPTS[i]): answer for i, answer in zip(few, expected, strict=True)})
    assert run(engine, sequences) == expected
    assert 0 < sum(s.accepted_tokens for s in sequences) < sum(s.drafted_tokens for s in sequences)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5_text", **LONG)])
def test_batches_prefix_hits_quantized_pages_and_preemptions_at_once(name, tmp_path):
    """The head's pages are found again like all others', also from disk, and what it says after that is what it says without all this."""
    shared = rng.integers(3, 96, 140).tolist()
    prompts = [shared, [*shared, 7, 8, 9], [*shared[:128], *range(10, 30)], shared[:70]]

    def asked():
        settings = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 9}, {}]
        return [request(p, 40, **v) for p, v in zip(prompts, settings, strict=True)]

    plain = run(tiny_engine(name, KVFormat.parse("4"), max_draft=0), asked())
    model = model_with_head(name, HEAD if name == "llama" else True)[0]
    for _ in range(2):
        disk = DiskStorage(tmp_path / "pages", 10**8)
        engine = engine_with(model, "4", max_num_seqs=3, disk=disk)
        Prompter(engine, dict(zip(map(tuple, prompts), plain, strict=True)))
        first, rest = asked()[:1], asked()[1:]
        assert run(engine, first) == plain[:1]
        scheduler, schedule, calls = engine.scheduler, engine.scheduler.schedule, []

        def sometimes_preempting(scheduler=scheduler, schedule=schedule, calls=calls):
            calls.append(0)
            return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (5, 12) and scheduler.running else schedule()

        scheduler.schedule = sometimes_preempting
        assert run(engine, rest) == plain[1:]
        assert engine.stats().preemptions == 2
        assert sum(s.reused_tokens for s in rest) >= 128
        assert all(s.drafted_tokens > s.accepted_tokens > 0 for s in first + rest)
        engine.close()
    assert first[0].reused_tokens >= 128  # from disk


def test_samples_fork_with_the_head():
    model = model_with_head("llama", HEAD)[0]

    def asked():
        samples = [request(PROMPTS[4], 30, index=i, temperature=1.0, seed=6) for i in range(3)]
        samples[0].lead(samples[1:])
        return samples

    def answers(engine, samples):
        engine.add(samples[0])
        while not engine.idle:
            engine.step()
        return [s.answer for s in samples]

    sequences = asked()
    assert answers(engine_with(model), sequences) == answers(tiny_engine("llama", max_draft=0), asked())
    assert all(s.drafted_tokens for s in sequences)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_after_a_prefix_hit_the_head_says_what_it_says_without(name):
    """Its first drafts are compared: keys and values of the whole prompt were found, and the hidden row before the new tokens."""
    model = model_with_head(name, HEAD if name == "llama" else True)[0]
    prompt = PROMPTS[4]

    def first_drafts(engine, tokens):
        said, draft = [], engine.proposer.draft
        real = draft.propose

        def listen(wanted):
            real(wanted)
            said.append([s.drafts.tolist() for s, _ in wanted])

        draft.propose = listen
        sequence = request(tokens, 6)
        run(engine, [sequence])
        return said[0], sequence.reused_tokens

    warm = engine_with(model)
    run(warm, [request(prompt, 1)])
    found, reused = first_drafts(warm, [*prompt, 5, 6, 7])
    expected, none = first_drafts(engine_with(model), [*prompt, 5, 6, 7])
    assert (reused >= 128, none) == (True, 0)
    assert found == expected


def test_a_head_that_promises_nothing_is_tried_again_from_time_to_time(monkeypatch):
    """Also while each step is built before the one before it has ended."""
    monkeypatch.setattr(proposer, "best_lengths", lambda candidates, rows, times: ([0] * len(candidates), 1.0))
    sequences = [request(PROMPTS[0], 120)]
    run(engine_with(model_with_head("llama", HEAD)[0]), sequences)
    assert 1 <= sequences[0].drafted_tokens <= 3
