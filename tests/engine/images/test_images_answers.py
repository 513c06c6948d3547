"""Answers about images through the engine are those of transformers, however requests meet."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines.tiny_engine import UNMEASURED, run
from support.models.seeing import case_request, cases, seeing_engine, seeing_request

from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.types import SamplingParams

NAMES = sorted(cases())
TEXT = [7, 31, 5, 100, 42, 9, 9, 250, 3]


def text_request(limit: int = 16) -> Sequence:
    return Sequence(list(TEXT), SamplingParams(temperature=0.0), 0, len(TEXT) + limit)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 500])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_of_any_chunks(name: str, rows: int) -> None:
    engine, sequence = seeing_engine(max_num_batched_tokens=rows, max_num_seqs=1), case_request(name)
    assert run(engine, [sequence]) == [cases()[name].greedy]
    assert sequence.image_encode_s > 0
    assert not engine.encoder.busy


@pytest.mark.smoke
def test_a_batch_of_text_and_images() -> None:
    alone = run(seeing_engine(), [text_request()])[0]
    sequences = [text_request(), *map(case_request, NAMES), text_request()]
    assert run(seeing_engine(**UNMEASURED), sequences) == [alone, *(cases()[name].greedy for name in NAMES), alone]


def test_requests_that_arrive_one_by_one() -> None:
    engine = seeing_engine(max_num_batched_tokens=16, max_num_seqs=3)
    sequences = [case_request(NAMES[which % len(NAMES)]) for which in range(9)]
    for which, sequence in enumerate(sequences):
        engine.add(sequence)
        for _ in range(which % 4):
            engine.step()
    while not engine.idle:
        engine.step()
    assert [s.answer for s in sequences] == [cases()[NAMES[which % len(NAMES)]].greedy for which in range(9)]


def test_another_picture_under_the_same_ids_is_another_prompt() -> None:
    case = cases()["one"]
    other = np.ascontiguousarray(255 - case.pictures[0])
    engine = seeing_engine()
    first, second = case_request("one"), seeing_request(case.messages, [other])
    assert first.prompt == second.prompt
    alone = run(seeing_engine(prefix_cache=False), [seeing_request(case.messages, [other])])[0]
    assert run(engine, [first]) == [case.greedy]
    assert run(engine, [second]) == [alone]
    assert alone != case.greedy
    assert second.reused_tokens <= second.images.runs[0].start
    assert second.images_cached == 0
