"""Whole requests: drafts, right and wrong, and sequences that lose their pages give the same answers, token for token."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support.engines.drafting import Free, Guesser, noisy_model
from support.engines.tiny_engine import request, run
from support.models.families import column, loaded_model, reference

from mlxinfer.cache.base import RecurrentSpec
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.spec_decode.draft_model import Drafter

LIMIT = 12


def prompts(name: str) -> list[list[int]]:
    """One that fills a page while it answers, one that has filled one, and a short one."""
    tokens = reference(name)[0]
    return [tokens[:58], tokens[:70], tokens[5:9]]


def requests(name: str) -> list[Sequence]:
    settings = [{}, {"temperature": 0.9, "seed": 4}, {}]
    return [request(prompt, LIMIT, **params) for prompt, params in zip(prompts(name), settings, strict=True)]


def engine_of(name: str, drafter: Drafter | None = None, **settings: int) -> Engine:
    values = {"max_context": 256, "kv_cache_tokens": 4096, "max_num_batched_tokens": 80, "max_num_seqs": 4} | settings
    return Engine(loaded_model(name), EngineConfig(**values), dtype=mx.float32, drafter=drafter)


@cache
def plain(name: str) -> list[list[int]]:
    return run(engine_of(name, max_draft=0), requests(name))


@pytest.mark.long
@column("preemption")
def test_a_sequence_that_lost_its_pages_answers_the_same(name: str) -> None:
    engine = engine_of(name, max_draft=0)
    scheduler, schedule, calls = engine.scheduler, engine.scheduler.schedule, []

    def sometimes_preempting() -> Schedule:
        calls.append(0)
        return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (4, 9) and scheduler.running else schedule()

    scheduler.schedule = sometimes_preempting  # type: ignore[method-assign]
    assert run(engine, requests(name)) == plain(name)
    assert engine.stats().preemptions == 2


@pytest.mark.long
@column("drafts")
def test_drafts_right_and_wrong_change_nothing(name: str) -> None:
    """Those of an n-gram search, or of any other guess."""
    expected, engine = plain(name), engine_of(name)
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    Guesser(engine.proposer, dict(zip(map(tuple, prompts(name)), expected, strict=True)), 3)
    sequences = requests(name)
    assert run(engine, sequences) == expected
    assert sum(s.drafted_tokens for s in sequences) > 0


@pytest.mark.long
@column("a draft model")
def test_a_draft_model_changes_nothing(name: str) -> None:
    """The same model with noise, or Llama where a model's own states cannot be drafted with."""
    recurrent = any(isinstance(spec, RecurrentSpec) for spec in loaded_model(name).layers)
    draft = noisy_model(0.05, "llama" if recurrent else name)
    engine = engine_of(name, Drafter(draft, mx.float32, 0.0001))
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    engine.proposer.ngrams = False
    sequences = requests(name)
    assert run(engine, sequences) == plain(name)
    assert sum(s.drafted_tokens for s in sequences) > 10


def test_prompts_of_a_family_are_not_all_alike() -> None:
    assert len({np.array(prompt).tobytes() for prompt in prompts("llama")}) == 3
