"""Gemma 4's assistant and EAGLE-3 heads in a running engine change no answer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.engines.drafting import Free
from support.engines.tiny_engine import request, run, tiny_engine
from support.models.heads import EAGLE3, EAGLE3_TOKENS, Prompter, eagle3_directory, engine_with, model_with_assistant, model_with_head
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.models.decoder import Model

rng = np.random.default_rng(8)
SHARED = rng.integers(3, 96, 140).tolist()
PROMPTS = [SHARED, [*SHARED, 7, 8, 9], [*SHARED[:128], *range(10, 30)], SHARED[:70]]
SETTINGS = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 9, "top_k": 20}, {"repetition_penalty": 1.2}]


@cache
def model(name: str) -> Model:
    if name != "llama":
        return model_with_assistant(name)
    return model_with_head(name, EAGLE3 | {"d2t": [token - i for i, token in enumerate(EAGLE3_TOKENS)]})[0]


def asked(limit: int = 40) -> list[Sequence]:
    return [request(p, limit, **v) for p, v in zip(PROMPTS, SETTINGS, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("gemma4_text_shared", "4"),
        ("llama", "16"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("gemma4_text_shared", "16"), ("llama", "4"))),
        *(pytest.param("gemma4_text", kv, marks=pytest.mark.slow) for kv in ("16", "4")),
    ],
)
def test_batches_prefix_hits_pages_and_preemptions_change_no_answer(name: str, kv: str, tmp_path: Path) -> None:
    """Tokens as without drafts, at temperature 0 and 1, and again from pages on disk."""
    plain = run(tiny_engine(name, KVFormat.parse(kv), max_draft=0), asked())
    for turn in range(2 if kv == "4" else 1):
        engine = engine_with(model(name), kv, max_num_seqs=3, disk=DiskStorage(tmp_path / "pages", 10**8))
        Prompter(engine, dict(zip(map(tuple, PROMPTS), plain, strict=True)))
        first, rest = asked()[:1], asked()[1:]
        assert run(engine, first) == plain[:1]
        scheduler, schedule, calls = engine.scheduler, engine.scheduler.schedule, []

        def sometimes_preempting(scheduler=scheduler, schedule=schedule, calls=calls):  # type: ignore[no-untyped-def]
            calls.append(0)
            return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (5, 12) and scheduler.running else schedule()

        scheduler.schedule = sometimes_preempting  # type: ignore[method-assign]
        assert run(engine, rest) == plain[1:]
        assert engine.stats().preemptions == 2
        assert sum(s.reused_tokens for s in rest) >= 128
        assert all(s.drafted_tokens > s.accepted_tokens > 0 for s in first + rest)
        engine.close()
        assert not turn or first[0].reused_tokens >= 128  # from disk


@pytest.mark.parametrize("name", ["gemma4_text", "llama"])
def test_after_a_prefix_hit_it_says_what_it_says_without(name: str) -> None:
    def first_drafts(engine, tokens):  # type: ignore[no-untyped-def]
        said, draft = [], engine.proposer.draft
        real = draft.propose

        def listen(wanted):  # type: ignore[no-untyped-def]
            real(wanted)
            said.append([s.drafts.tolist() for s, _ in wanted])

        draft.propose = listen
        sequence = request(tokens, 6)
        run(engine, [sequence])
        return said[0], sequence.reused_tokens

    warm = engine_with(model(name))
    run(warm, [request(SHARED, 1)])
    found, reused = first_drafts(warm, [*SHARED, 5, 6, 7])
    expected, none = first_drafts(engine_with(model(name)), [*SHARED, 5, 6, 7])
    assert (reused >= 128, none) == (True, 0)
    assert found == expected


def test_from_directories_as_users_load_them(tmp_path: Path) -> None:
    base = tiny_directory(tmp_path / "base", context=256)
    head = eagle3_directory(tmp_path / "drafter", EAGLE3)

    def answers(draft: Path | None) -> tuple[list[list[int]], int]:
        with LLM(base, draft=draft, speculate=False, dtype="float32", memory_gb=2) as llm:
            llm.engine.proposer.times, llm.engine.proposer.account.share = Free(), 1e9
            if llm.engine.proposer.draft is not None:
                llm.engine.proposer.draft.cost = 1e-4
            params = [SamplingParams(temperature=t, seed=i, max_tokens=20) for i, t in enumerate((0.0, 1.0))]
            return [c.token_ids for c in llm.generate(["Write", "Say"], params)], llm.engine.stats().drafted_tokens

    (plain, none), (headed, drafted) = answers(None), answers(head)
    assert headed == plain
    assert (none, drafted > 5) == (0, True)
