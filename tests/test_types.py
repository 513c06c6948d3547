"""Statistics of an engine that failed, and of the one that took its place."""

from __future__ import annotations

from mlxinfer.types import EngineStats


def test_requests_are_added_and_the_present_is_that_of_the_later_one() -> None:
    before = EngineStats(
        requests=2, prompt_tokens=10, decode_s=1.5, steps=7, running=3, waiting=4, pages=100, pages_used=5, pages_cached=6, restarts=1
    )
    later = EngineStats(requests=1, prompt_tokens=4, decode_s=0.5, steps=2, running=1, pages=90, pages_used=2)
    assert before + later == EngineStats(requests=3, prompt_tokens=14, decode_s=2.0, steps=9, running=1, pages=90, pages_used=2)


def test_reads_of_experts_belong_to_the_model_whatever_engine_runs_it() -> None:
    failed = EngineStats(requests=1, expert_bytes_read=100, expert_hits=3, expert_misses=1, expert_wait_s=0.5, experts=8, expert_slots=4)
    now = EngineStats(requests=2, expert_bytes_read=150, expert_hits=9, expert_misses=1, expert_wait_s=0.5, experts=8, expert_slots=6)
    both = failed.without_experts() + now
    assert both == EngineStats(
        requests=3, expert_bytes_read=150, expert_hits=9, expert_misses=1, expert_wait_s=0.5, experts=8, expert_slots=6
    )
    assert both.expert_hit_rate == 0.9
    assert EngineStats().expert_hit_rate == 1.0
    assert (failed + now).expert_bytes_read == 250
