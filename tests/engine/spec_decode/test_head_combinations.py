"""Draft heads combined with other features of requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.drafting import Free
from support.engines.tiny_engine import request, run
from support.models.adapters import random_changes, shapes_of, write_peft
from support.models.heads import HEAD, Prompter, engine_with, head_directory, model_with_head
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, SamplingParams, Schema
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.interpret.interventions import steering

rng = np.random.default_rng(4)
PROMPTS = [rng.integers(3, 96, n).tolist() for n in (60, 9, 63)]
MODELS = [("llama", HEAD), ("qwen3_5_text", True)]


def asked(limit: int = 40) -> list[Sequence]:
    return [request(prompt, limit, temperature=0.0 if i else 1.0, seed=i) for i, prompt in enumerate(PROMPTS)]


def drafting(name: str, head: object, expected: list[list[int]], **settings: int) -> Engine:
    made = engine_with(model_with_head(name, head)[0], **settings)  # type: ignore[arg-type]
    Prompter(made, dict(zip(map(tuple, PROMPTS), expected, strict=True)))
    return made


def test_pages_that_run_out() -> None:
    """Sequences give theirs back on the way, the head's with them. All prompts are read in one step, so that they grow together."""
    expected = run(engine_with(model_with_head("llama", HEAD)[0], max_draft=0), asked(130))
    made, sequences = drafting("llama", HEAD, expected, kv_cache_tokens=256, max_num_batched_tokens=256), asked(130)
    assert run(made, sequences) == expected
    assert made.stats().preemptions > 0
    assert all(s.drafted_tokens for s in sequences)


def test_steered_requests_next_to_others() -> None:
    """Only the others get drafts of the head, which has not seen what the hooks changed."""
    model = model_with_head("llama", HEAD)[0]
    hooks = steering(model, 1, mx.array(rng.normal(0, 3, 48).astype(np.float32)), 1.0, None)

    def steered() -> list[Sequence]:
        sequences = asked()
        sequences[1].hooks = hooks
        return sequences

    plain = engine_with(model, max_draft=0)
    expected = run(plain, steered())
    assert expected[1] != run(plain, asked())[1]
    made = drafting("llama", HEAD, expected)
    sequences = steered()
    assert run(made, sequences) == expected
    assert [s.drafted_tokens > 0 for s in sequences] == [True, False, True]


@pytest.mark.parametrize(("name", "head"), MODELS)
def test_cancelled_with_drafts_in_flight(name: str, head: object) -> None:
    """The slot goes to another, whose states are its own."""
    expected = run(engine_with(model_with_head(name, head)[0], max_draft=0, max_num_seqs=2), asked())  # type: ignore[arg-type]
    made, sequences = drafting(name, head, expected, max_num_seqs=2), asked()
    for sequence in sequences:
        made.add(sequence)
    while not sequences[0].drafted_tokens:
        made.step()
    made.abort(sequences[0])
    while not made.idle:
        made.step()
    assert [s.answer for s in sequences[1:]] == expected[1:]
    assert all(not store._tried for store in made.cache.recurrent)


def test_deterministic_engines_draft_nothing() -> None:
    model = model_with_head("llama", HEAD)[0]
    made, sequences = engine_with(model, deterministic=True), asked()
    answers = run(made, sequences)
    alone: Callable[[Sequence], list[list[int]]] = lambda s: run(engine_with(model, deterministic=True), [s])  # noqa: E731
    assert [alone(s)[0] for s in asked()] == answers
    assert not any(s.drafted_tokens for s in sequences)


def test_held_to_a_structure_with_samples_and_adapters(tmp_path: Path) -> None:
    """From a directory, as users load it: whole answers with log-probabilities are those without a head."""
    base = tiny_directory(tmp_path / "base", characters=JSON_CHARACTERS, context=256)
    adapter = write_peft(tmp_path / "a", random_changes(shapes_of(base)))
    head = head_directory(tmp_path / "head", HEAD)
    structure = Schema({"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}, "required": ["n"]})

    def answers(draft: Path | None) -> tuple[list[tuple[list[int], list[int]]], int]:
        with LLM(base, draft=draft, speculate=False, adapters={"a": adapter}, dtype="float32", memory_gb=2) as llm:
            llm.engine.proposer.times, llm.engine.proposer.account.share = Free(), 1e9
            if llm.engine.proposer.draft is not None:
                llm.engine.proposer.draft.cost = 1e-4
            params = [
                SamplingParams(
                    temperature=1.0, seed=i, n=2, logprobs=1, max_tokens=30, structure=structure if i < 2 else None, adapter=name
                )
                for i, name in enumerate((None, "a", "a"))
            ]
            found = llm.generate(["Write", "Say", "Tell"], params)
            drafted = llm.engine.stats().drafted_tokens
            return [(c.token_ids, [t.token_id for t in c.logprobs or ()]) for c in found], drafted

    (plain, none), (headed, drafted) = answers(None), answers(head)
    assert headed == plain
    assert (none, drafted > 20) == (0, True)
