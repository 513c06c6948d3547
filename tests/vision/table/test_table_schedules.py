"""However prompts are cut, batched, preempted and forked, their logits and answers stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines.tiny_engine import UNMEASURED, run
from support.models.seeing import cases, seeing_engine
from support.vision.table import STRIDE, answers, array, error, limit, logits_in, negative, plain_logits, prompt, sees, text_request

from mlxinfer.cache.base import PAGE
from mlxinfer.engine.core.schedule import Schedule


@sees("chunks")
def test_chunks_at_the_ends_of_an_image(name: str) -> None:
    """Chunks of 16 rows, and of one row less and more than the longest run of image rows."""
    asked, expected = prompt(name, "two"), array(name, "two_logits")
    longest = max(run.count for run in asked.images.runs)
    for rows in {16, longest - 1, longest, longest + 1} - {0}:
        found = logits_in(seeing_engine(name, max_num_batched_tokens=rows, max_num_seqs=1), asked)
        assert error(found[:, ::STRIDE], expected) < limit(name, expected), rows


@sees("batch")
def test_others_in_the_same_steps(name: str) -> None:
    """Text, and other images, that arrive at once or one after the other."""
    given = [case for case, found in cases(name).items() if found.pictures]
    text = answers(seeing_engine(name), text_request())[0]
    expected = [text, *(cases(name)[case].greedy for case in given), text]
    assert answers(seeing_engine(name, **UNMEASURED), *_mixed(name, given)) == expected
    engine, late = seeing_engine(name, max_num_batched_tokens=40, max_num_seqs=3), _mixed(name, given)
    for count, sequence in enumerate(late):
        engine.add(sequence)
        for _ in range(count):
            engine.step()
    while not engine.idle:
        engine.step()
    assert [sequence.answer for sequence in late] == expected


def _mixed(name: str, given: list[str]) -> list:
    return [text_request(), *(prompt(name, case).request() for case in given), text_request()]


@sees("page boundaries")
def test_pages_end_anywhere(name: str) -> None:
    """Before, within and after the image."""
    asked = prompt(name, "one")
    first, end = asked.ranges[0]
    for count in sorted({1, (-first) % PAGE, (-first - 1) % PAGE, (-end) % PAGE, (PAGE - (first + end) // 2) % PAGE}):
        shifted = asked.behind(count)
        expected = plain_logits(shifted)
        assert error(logits_in(seeing_engine(name), shifted), expected) < limit(name, expected), count


@sees("fork")
def test_samples_of_one_prompt(name: str) -> None:
    """Four samples read the prompt once, and answer as four requests do."""
    asked = prompt(name, "one")
    params = {"temperature": 1.5, "seed": 3}
    alone = [answers(seeing_engine(name), asked.request(index=index, **params))[0] for index in range(4)]
    first, *others = [asked.request(index=index, **params) for index in range(4)]
    first.samples_to_fork = others
    engine = seeing_engine(name)
    engine.add(first)
    while not engine.idle:
        engine.step()
    assert [each.answer for each in (first, *others)] == alone
    assert len({tuple(answer) for answer in alone}) > 1
    assert engine.encoder is not None
    assert len(engine.encoder.features) == 1


@pytest.mark.long
@sees("preemption")
def test_sequences_that_lost_their_pages(name: str) -> None:
    """While the prompt is read, and while it is answered."""
    engine = seeing_engine(name, max_num_batched_tokens=48, max_draft=0)
    scheduler, schedule, calls = engine.scheduler, engine.scheduler.schedule, []

    def sometimes_preempting() -> Schedule:
        calls.append(0)
        return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (2, 4, 9, 14) and scheduler.running else schedule()

    scheduler.schedule = sometimes_preempting  # type: ignore[method-assign]
    given = [case for case, found in cases(name).items() if found.pictures]
    assert answers(engine, *(prompt(name, case).request() for case in given)) == [cases(name)[case].greedy for case in given]
    assert engine.stats().preemptions >= 3


@sees("few features")
def test_a_tiny_cache_of_features(name: str) -> None:
    """Features are encoded again where the cache has no room, and none stay."""
    engine = seeing_engine(name, image_features_bytes=0, prefix_cache=False, max_num_batched_tokens=32)
    asked = prompt(name, "two")
    other = asked.with_pictures([negative(picture) for picture in cases(name)["two"].pictures])
    found = answers(engine, asked.request(), other.request(), asked.request())
    assert found[0] == found[2] == cases(name)["two"].greedy
    assert answers(engine, asked.request()) == [found[0]]
    assert engine.encoder is not None
    assert engine.encoder.features.nbytes == 0


@sees("deterministic")
def test_rows_do_not_depend_on_others(name: str) -> None:
    """To the bit, in the deterministic mode."""
    asked = prompt(name, "two")
    alone = logits_in(seeing_engine(name, deterministic=True, **UNMEASURED), asked)
    engine = seeing_engine(name, deterministic=True, **UNMEASURED)
    for start in range(3):
        engine.add(text_request(start=start))
    engine.step()
    np.testing.assert_array_equal(logits_in(engine, asked), alone)
    assert run(seeing_engine(name, deterministic=True), [asked.request()]) == [cases(name)["two"].greedy]
