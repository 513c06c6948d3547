"""Requests with different adapters run together, and each gets what it gets alone: with everything else that requests can have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engines.drafting import Guesser
from support.engines.tiny_engine import UNMEASURED
from support.models.adapters import merge, random_changes, shapes_of, write_mlx_lm, write_peft
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, Choice, SamplingParams
from mlxinfer.adapters import batched_lora as stacked
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.open_model import OpenModel
from mlxinfer.engine.request_keywords import RequestOptions
from mlxinfer.errors import SamplingError, SettingError

NAMES = (None, "a", "b", "c", "d")
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 96, 40 + 17 * seed)] for seed in range(5)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("base") / "llama", eos=False, context=1024, characters=JSON_CHARACTERS)


@pytest.fixture(scope="module")
def paths(base, tmp_path_factory) -> dict[str, Path]:
    """Different ranks, formats, projections and layers."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), shapes_of(base)
    return {
        "a": write_peft(folder / "a", random_changes(shapes, 1, rank=8), rank=8),
        "b": write_mlx_lm(folder / "b", random_changes(shapes, 2, projections=["q_proj", "v_proj"], size=0.4)),
        "c": write_peft(folder / "c", random_changes(shapes, 3, dora=True, layers=[0])),
        "d": write_peft(folder / "d", random_changes(shapes, 4, rank=2, projections=["down_proj", "gate_proj"], size=0.4), rank=2),
    }


def opened(base: Path, paths: dict[str, Path], **settings: object) -> LLM:
    return LLM(base, adapters=paths, **{"memory_gb": 2, "dtype": "float32", **settings})


def params(adapter: str | None, **more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "adapter": adapter, **more})


def answers(llm: LLM, names, prompts=PROMPTS, **more: object) -> list[list[int]]:
    return [c.token_ids for c in llm.generate(list(prompts), [params(name, **more) for name in names])]


@pytest.fixture(scope="module")
def alone(base, paths) -> list[list[int]]:
    with opened(base, paths, prefix_cache=False) as llm:
        return [answers(llm, [name], [prompt])[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)]


def test_each_changes_its_answer(base, paths, alone):
    with opened(base, {}, prefix_cache=False) as llm:
        plain = [answers(llm, [None], [prompt])[0] for prompt in PROMPTS]
    assert [mine == without for mine, without in zip(alone, plain, strict=True)] == [True, False, False, False, False]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 2, 1), (1, 1, 1, 1), (2, 0, 2, 0), (4, 3)])
def test_together_as_alone(base, paths, alone, order):
    with opened(base, paths) as llm:
        assert answers(llm, [NAMES[i] for i in order], [PROMPTS[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("long_run", [0, 10**9])
def test_runs_and_gathered_products_agree(base, paths, alone, monkeypatch, long_run):
    monkeypatch.setattr(stacked, "LONG_RUN", long_run)
    with opened(base, paths) as llm:
        assert answers(llm, NAMES) == alone


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 2},
        {"deterministic": True},
        {"speculate": False},
        {"memory_gb": 0.0445, "max_context": 256},
    ],
    ids=["two at a time", "deterministic", "without drafts", "short of memory"],
)
def test_with_other_settings(base, paths, alone, settings):
    with opened(base, paths, **settings) as llm:
        assert answers(llm, NAMES) == alone


def test_preempted(base, paths, alone):
    """Twice as many sequences as have room for their whole answers."""
    with opened(base, paths, prefix_cache=False, max_num_seqs=5) as llm:
        opened_model = llm._client.opened
        engine = opened_model.engine()
        engine.config = replace(engine.config, kv_cache_tokens=448, **UNMEASURED)
        engine._start()
        sequences = run(engine, opened_model, max_tokens=90)
        assert sum(sequence.preemptions for sequence in sequences)
        assert [sequence.answer[:24] for sequence in sequences] == alone


def run(engine: Engine, model: OpenModel, **more: object) -> list[Sequence]:
    """The sequences of all prompts, ended."""
    pairs = zip(NAMES, PROMPTS, strict=True)
    sequences = [model.inputs.sequences(prompt, params(name, **more), RequestOptions())[0] for name, prompt in pairs]
    for sequence in sequences:
        engine.add(sequence)
    while not engine.idle:
        engine.step()
    return sequences


def test_a_quantized_cache_and_several_samples(base, paths):
    with opened(base, paths, kv="4") as llm:
        together = [c.token_ids for c in llm.generate(PROMPTS, [params(name, n=3, temperature=1.0, seed=7) for name in NAMES])]
        one_by_one = [
            c.token_ids for n, p in zip(NAMES, PROMPTS, strict=True) for c in llm.generate(p, params(n, n=3, temperature=1.0, seed=7))
        ]
        assert together == one_by_one
        assert len({tuple(tokens) for tokens in together}) == 15


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits(base, paths, dtype):
    with opened(base, paths, dtype=dtype, prefix_cache=False) as llm:
        together = answers(llm, NAMES, max_tokens=12)
        assert [answers(llm, [name], [prompt], max_tokens=12)[0] for name, prompt in zip(NAMES, PROMPTS, strict=True)] == together


def test_drafts_are_verified_by_the_adapter(base, paths, alone):
    with opened(base, paths, prefix_cache=False) as llm:
        opened_model = llm._client.opened
        engine = opened_model.engine()
        Guesser(engine.proposer, dict(zip(map(tuple, PROMPTS), alone, strict=True)), 3)
        sequences = run(engine, opened_model)
        assert [sequence.answer for sequence in sequences] == alone
        drafted, accepted = (sum(getattr(s, name) for s in sequences) for name in ("drafted_tokens", "accepted_tokens"))
        assert 0 < accepted < drafted


def test_held_to_a_structure(paths, tmp_path):
    choice = Choice(("yes", "no", "perhaps"))
    ending = tiny_directory(tmp_path / "ending", characters=JSON_CHARACTERS)
    with opened(ending, paths) as llm:
        texts = [c.text for c in llm.generate(["Well?"] * 5, [params(name, structure=choice) for name in NAMES])]
        assert texts == [llm.generate("Well?", params(name, structure=choice))[0].text for name in NAMES]
        assert set(texts) <= {"yes", "no", "perhaps"}


def test_scored_and_traced_with_an_adapter(base, paths, tmp_path):
    changes = random_changes(shapes_of(base), 1, rank=8)
    with LLM(merge(tiny_directory(tmp_path / "merged", eos=False), changes), dtype="float32", memory_gb=2) as llm:
        scores = [token.logprob for token in llm.score(PROMPTS[0])]
        stream = np.array(llm.trace(PROMPTS[0])["residual"][1])
    with opened(base, paths) as llm:
        assert np.allclose([token.logprob for token in llm.score(PROMPTS[0], adapter="a")], scores, atol=1e-4)
        assert np.allclose(np.array(llm.trace(PROMPTS[0], adapter="a")["residual"][1]), stream, atol=1e-4)
        assert not np.allclose([token.logprob for token in llm.score(PROMPTS[0])], scores, atol=1e-2)


def test_steps_without_adapters_take_the_models_own_path(base, paths, monkeypatch):
    with opened(base, paths) as llm, opened(base, {}) as plain:
        monkeypatch.setattr(llm.engine._adapted, "for_rows", lambda rows: pytest.fail("no row has an adapter"))
        assert np.array_equal(np.array(llm.logits(PROMPTS[1])), np.array(plain.logits(PROMPTS[1])))
        assert answers(llm, [None] * 5) == answers(plain, [None] * 5)
        assert llm.engine.model is llm.loaded.model
        monkeypatch.undo()
        answers(llm, NAMES)
        assert np.array_equal(np.array(llm.logits(PROMPTS[1])), np.array(plain.logits(PROMPTS[1])))


def test_an_unknown_adapter_and_names_that_cannot_be(base, paths):
    with opened(base, paths) as llm:
        assert llm.adapters == ("a", "b", "c", "d")
        with pytest.raises(SamplingError, match="there is none called 'e'; there are a, b, c, d"):
            llm.generate("hi", params("e"))
    with opened(base, {}) as llm, pytest.raises(SamplingError, match="loaded without adapters"):
        llm.generate("hi", params("a"))
    for wrong in ({"a/b": "x"}, {"latest": "x"}, {"": "x"}, {"a": 3}, ["a"], {"a:b": "x"}):
        with pytest.raises(SettingError, match="adapters"):
            LLM(base, adapters=wrong)
    with pytest.raises(SamplingError, match="adapter must be a name"):
        SamplingParams(adapter=3)


def test_the_plan_counts_adapters(base, paths):
    with opened(base, {}) as plain, opened(base, paths) as llm:
        more = llm.plan.weights - plain.plan.weights
        adapted = llm._client.opened.adapters.adapted
        assert more == adapted.nbytes > 0
        assert llm.plan.used <= llm.plan.limit
