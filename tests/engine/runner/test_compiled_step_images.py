"""Replayed steps of answers about images, whose rotary positions are not indices: a trace keeps no sequence's shift."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engines.replayed import choices_of_a_gpu, steps
from support.models.seeing import case_request, cases, seeing_engine

from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Token


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> Iterator[None]:
    with choices_of_a_gpu():
        yield


def answers(made: Engine, family: str, names: list[str]) -> list[list[tuple[int, float]]]:
    requests = [case_request(name, family=family, logprobs=2) for name in names]
    found: list[list[tuple[int, float]]] = [[] for _ in requests]
    for request in requests:
        made.add(request)
    while not made.idle:
        for event in made.step():
            if isinstance(event, Token):
                found[requests.index(event.sequence)].append((event.token_id, float(event.logprob or 0.0)))
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_answers_with_other_shifts_by_the_same_trace(family: str) -> None:
    settings = {"prefix_cache": False, "max_draft": 0, "max_num_batched_tokens": 256}
    made, built = seeing_engine(family, **settings), seeing_engine(family, **settings)
    built.runner.compiled = None
    for names in (["one"], ["two"], ["text"], ["one", "two"], ["turns", "one"], ["text", "two"]):
        for found, expected, name in zip(answers(made, family, names), answers(built, family, names), names, strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected] == cases(family)[name].greedy
            # Which requests share a step depends on when images are encoded, and MLX's products round by the number of rows.
            assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in expected], abs=2e-5)
    assert steps(made).replayed > 40
