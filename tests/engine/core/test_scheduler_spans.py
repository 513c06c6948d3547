"""Images whose rows see one another are whole chunks, in any schedule."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.counting_engine import CountingEngine, sequence
from support.processes.examples import examples

from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.vision.inputs import PromptImages

LONGEST = 150
PAGES = 10
REQUEST = st.fixed_dictionaries(
    {
        "at": st.integers(0, 40),
        "parts": st.lists(st.tuples(st.integers(0, 90), st.integers(1, LONGEST)), max_size=4),
        "last": st.integers(1, 80),
        "answer": st.integers(1, 100),
        "start": st.sampled_from([0, 0, 5000, 9000]),
        "client_id": st.sampled_from(["", "a"]),
        "points": st.lists(st.integers(1, 600), max_size=3),
    }
)
"""Parts are text and the image after it. Points, where the prompt is cached, may be inside of images: then they are not kept."""


def seeing(
    parts: list[tuple[int, int]], last: int, answer: int, start: int = 0, points: tuple[int, ...] = (), **fields: object
) -> Sequence:
    spans, length = [], 0
    for text, rows in parts:
        spans.append((length + text, length + text + rows))
        length += text + rows
    length += last
    images = PromptImages((), (), array("q"), spans=tuple(spans))
    return sequence(length, answer, start=start, images=images, snapshot_points=tuple(sorted(points)), **fields)


def check_chunks(engine: CountingEngine) -> None:
    for s, past, count in engine.chunks:
        spans = s.images.spans if s.images else ()
        touched = [(first, end) for first, end in spans if first < past + count and past < end]
        assert not touched or touched == [(past, past + count)]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=6), st.sampled_from([4, 7, 64, 96]), st.booleans(), st.booleans())
def test_every_schedule_keeps_spans_whole_and_ends(requests: list[dict], rows: int, deterministic: bool, reuse: bool) -> None:
    rows = max(rows, 67) if deterministic else rows
    engine = CountingEngine(pages=PAGES, max_num_batched_tokens=rows, deterministic=deterministic, reuse=reuse, longest_span=LONGEST)
    plan = [(r.pop("at"), seeing(**{**r, "points": tuple(r["points"])})) for r in requests]
    plan = [(at, s) for at, s in plan if engine.pool.fits(s.max_length)]
    for step in range(20000):
        for at, s in plan:
            if at == step:
                engine.scheduler.add(s)
        engine.step()
        if step > 40 and engine.scheduler.idle and engine.pending is None:
            break
    else:
        pytest.fail("it does not end")
    check_chunks(engine)
    assert sorted(map(id, engine.finished)) == sorted(id(s) for _, s in plan)
    assert all(len(s.tokens) == s.max_length for _, s in plan)
    assert engine.pool.usage().used == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_span_longer_than_a_step_is_one_chunk(deterministic: bool) -> None:
    engine = CountingEngine(pages=64, max_num_batched_tokens=67, deterministic=deterministic, longest_span=LONGEST)
    engine.scheduler.add(seeing([(30, 150), (0, 5), (40, 64)], 20, 3))
    engine.run()
    chunks = [(past, past + count) for _, past, count in engine.chunks]
    assert {(30, 180), (180, 185), (225, 289)} <= set(chunks)
    assert chunks[0] == (0, 30)


def test_answers_go_on_while_a_span_waits_for_its_turn() -> None:
    """Its step has a row for each of them."""
    engine = CountingEngine(pages=64, max_num_batched_tokens=20, max_num_seqs=3, longest_span=LONGEST)
    answers = [sequence(5, 60, start=7000 * (i + 1)) for i in range(2)]
    for s in answers:
        engine.scheduler.add(s)
    engine.step()
    engine.step()
    image = seeing([(8, 150)], 10, 5)
    engine.scheduler.add(image)
    while image.num_computed_tokens < 158:
        before = [s.num_computed_tokens for s in answers]
        schedule = engine.step()
        assert [s.num_computed_tokens for s in answers] == [past + 1 for past in before]
    assert (schedule.decode_rows, schedule.prefill_rows) == (2, 150)
    engine.run()
    check_chunks(engine)


def test_a_preempted_sequence_reads_its_spans_whole_again() -> None:
    engine = CountingEngine(pages=8, max_num_batched_tokens=96, max_num_seqs=2, longest_span=LONGEST, reuse=False)
    both = [seeing([(10, 150)], 5, 200, start=start) for start in (0, 9000)]
    for s in both:
        engine.scheduler.add(s)
    engine.run()
    check_chunks(engine)
    assert [s.preemptions > 0 for s in both] == [False, True]
    assert [sum(who is s and past == 10 for who, past, _ in engine.chunks) for s in both] == [1, 1 + both[1].preemptions]


def test_a_span_without_pages_waits() -> None:
    """No part of it is computed."""
    engine = CountingEngine(pages=64, max_num_batched_tokens=96, max_num_seqs=2, longest_span=LONGEST, reuse=False)
    s = seeing([(10, 150)], 5, 20)
    engine.scheduler.add(s)
    engine.step()
    room = engine.pool.room
    engine.scheduler.pages = SimpleNamespace(room=lambda growth: sum(d.count for d in growth) < 100 and room(growth))
    assert not engine.step().work
    engine.scheduler.pages = engine.pool
    assert [w.count for w in engine.step().work] == [150]
    engine.run()


def test_deterministic_chunks_of_images_are_the_same_in_any_company() -> None:
    def shapes(company: int) -> list[tuple[int, int]]:
        engine = CountingEngine(pages=64, max_num_batched_tokens=80, deterministic=True, reuse=False, longest_span=LONGEST)
        for i in range(company):
            engine.scheduler.add(seeing([(20 + i, 100)], 30, 40, start=20000 * (i + 1), client_id=str(i)))
            engine.step()
        s = seeing([(70, 100), (3, 20)], 100, 5)
        engine.scheduler.add(s)
        engine.run()
        return sorted({(past, count) for who, past, count in engine.chunks if who is s})

    assert shapes(0) == shapes(2)
    assert {(64, 6), (70, 100), (170, 3), (173, 20), (193, 63)} <= set(shapes(0))
