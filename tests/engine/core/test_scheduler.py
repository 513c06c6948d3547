"""Properties of the scheduler, with the real page pool and without arrays."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.counting_engine import CountingEngine, sequence
from support.processes.examples import examples

from mlxinfer.cache.pages import PAGE
from mlxinfer.engine.core.chunk_policy import ChunkPolicy, DeterministicChunks
from mlxinfer.engine.core.prefill_budget import PrefillBudget
from mlxinfer.engine.core.request_queue import RequestQueue
from mlxinfer.engine.core.scheduler import Scheduler
from mlxinfer.engine.core.step_times import StepTimes

PAGES = 8
REQUEST = st.fixed_dictionaries(
    {
        "at": st.integers(0, 60),
        "prompt": st.integers(1, 300),
        "answer": st.integers(1, 150),
        "start": st.sampled_from([0, 0, 5000, 9000]),
        "client_id": st.sampled_from(["", "a", "b"]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "deadline": st.sampled_from([None, None, None, 0.05, 1.0]),
        "cancel": st.sampled_from([None, None, None, 0, 5, 40]),
    }
)


@pytest.mark.smoke
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=10), st.booleans(), st.booleans())
def test_whatever_comes_all_end_and_nothing_leaks(requests: list[dict], deterministic: bool, reuse: bool) -> None:
    engine = CountingEngine(pages=PAGES, max_num_batched_tokens=96, deterministic=deterministic, reuse=reuse)
    plan = [(r.pop("at"), r.pop("cancel"), sequence(r.pop("prompt"), r.pop("answer"), **r)) for r in requests]
    stuck, last = 0, None
    for step in range(20000):
        for at, cancel, s in plan:
            if at == step:
                engine.scheduler.add(s)
            if cancel is not None and at + cancel == step:
                engine.end(s)
                engine.end(s)
        engine.step()
        running = engine.scheduler.running
        oldest = min(running, key=lambda s: (s.priority, s.arrival)) if running else None
        state = (oldest, oldest.num_computed_tokens, len(oldest.tokens)) if oldest else None
        stuck = stuck + 1 if state and state == last else 0
        last = state
        assert stuck < 200, "the oldest does not go on"
        if step > 100 and engine.scheduler.idle and engine.pending is None:
            break
    else:
        pytest.fail("it does not end")
    for _, cancel, s in plan:
        assert s.finish_reason
        assert s.slot is None
        if s.finish_reason == "length":
            assert len(s.tokens) == s.max_length
        else:
            assert cancel is not None or s.deadline is not None
    assert engine.pool.usage().used == 0


@pytest.mark.smoke
def test_preempted_sequences_finish_with_all_their_tokens() -> None:
    engine = CountingEngine(pages=PAGES, reuse=False)
    both = [sequence(100, 380, start=9000 * i) for i in range(3)]
    for s in both:
        engine.scheduler.add(s)
    engine.run()
    assert [len(s.tokens) for s in both] == [480] * 3
    assert not both[0].preemptions
    assert sum(s.preemptions for s in both)
    assert [s.arrival for s in engine.finished] == [1, 2, 3]


def test_a_lower_priority_gives_up_its_seat() -> None:
    engine = CountingEngine(pages=64, max_num_seqs=2)
    low = [sequence(10, 500, priority=1, start=9000 * i) for i in range(2)]
    for s in low:
        engine.scheduler.add(s)
    engine.step()
    urgent = sequence(10, 5, priority=0, start=50000)
    engine.scheduler.add(urgent)
    for _ in range(2):
        engine.step()
    assert urgent in engine.scheduler.running
    assert low[0] in engine.scheduler.running
    assert low[1].preemptions == 1
    engine.run()
    assert engine.finished[0] is urgent
    assert {s.finish_reason for s in low} == {"length"}


def test_a_short_prompt_does_not_wait_for_another_clients_long_one() -> None:
    engine = CountingEngine(pages=300, max_num_batched_tokens=96)
    long, short = sequence(8000, 4, client_id="a"), sequence(20, 4, client_id="b", start=20000)
    engine.scheduler.add(long)
    engine.step()
    engine.scheduler.add(short)
    for _ in range(8):
        engine.step()
    assert len(short.tokens) > 20
    assert long.num_computed_tokens < 1000


@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_end_where_something_is_kept(deterministic: bool) -> None:
    engine = CountingEngine(pages=64, max_num_batched_tokens=128, deterministic=deterministic)
    s = sequence(301, 3, snapshot_points=(70, 200))
    engine.scheduler.add(s)
    engine.run()
    ends = [past + count for _, past, count in engine.chunks]
    assert {70, 200, 301} <= set(ends)
    others = set(ends) - {70, 200, 301, 302, 303}
    assert all(end % PAGE == 0 or end == 300 for end in others)
    if deterministic:
        assert {64, 128, 192, 256, 300} <= set(ends)


def test_samples_fork_before_the_last_token_of_the_prompt() -> None:
    engine = CountingEngine(pages=64)
    leader = sequence(90, 2)
    leader.lead([sequence(90, 2)])
    engine.scheduler.add(leader)
    engine.step()
    assert leader.num_computed_tokens in (64, 89)
    while leader.num_computed_tokens < 89:
        engine.step()
    assert leader.num_computed_tokens == 89


def test_deterministic_chunks_are_the_same_in_any_company() -> None:
    def shapes(company: int, pages: int) -> list[tuple[int, int]]:
        engine = CountingEngine(pages=pages, max_num_batched_tokens=80, deterministic=True, reuse=False)
        for i in range(company):
            engine.scheduler.add(sequence(150 + 17 * i, 300, start=20000 * (i + 1), client_id=str(i)))
            engine.step()
        s = sequence(200, 180)
        engine.scheduler.add(s)
        engine.run()
        return sorted({(past, count) for who, past, count in engine.chunks if who is s})

    assert shapes(0, 64) == shapes(2, 64) == shapes(3, PAGES)


def test_drafts_stay_within_the_budget_and_leave_room_for_prompts() -> None:
    engine = CountingEngine(pages=64, max_num_batched_tokens=12, max_num_seqs=2)
    s = sequence(4, 50)
    engine.scheduler.add(s)
    engine.step()
    engine.step()
    s.propose(list(range(30)))
    schedule = engine.scheduler.schedule()
    assert [(w.count, w.num_drafts) for w in schedule.work] == [(12, 11)]
    assert (schedule.decode_rows, schedule.prefill_rows, schedule.drafts) == (12, 0, 11)
    assert len(s.drafts) == 30
    engine.scheduler.add(sequence(40, 5, start=9000))
    engine.scheduler.admit(engine.allocate)
    s.propose(list(range(30)))
    assert engine.scheduler.schedule().work[0].num_drafts == 5


def test_too_small_a_budget_is_refused() -> None:
    def make(tokens: int, deterministic: bool) -> Scheduler:
        budget, engine = PrefillBudget(StepTimes(), share=0.75, max_step_s=0.1), CountingEngine(pages=4)
        return Scheduler(
            max_num_batched_tokens=tokens,
            max_num_seqs=8,
            pages=engine.pool,
            budget=budget,
            waiting=RequestQueue(4),
            chunks=DeterministicChunks() if deterministic else ChunkPolicy(),
        )

    assert make(8, False)
    with pytest.raises(ValueError, match="at least 8"):
        make(7, False)
    with pytest.raises(ValueError, match="at least 71"):
        make(70, True)


def test_none_of_it_imports_mlx() -> None:
    script = "import sys, mlxinfer.engine.core.scheduler, mlxinfer.engine.core.sequence; print(*{'mlx', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
