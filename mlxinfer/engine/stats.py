"""What a sequence took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..types import EngineStats, RequestStats

if TYPE_CHECKING:
    from .sequence import Sequence


def request_stats(sequence: Sequence) -> RequestStats:
    """So far. Times that have not begun are zero."""
    times = sequence.times
    started = times.started or times.added
    first = times.first_token or started
    return RequestStats(
        queued_s=started - times.added,
        prefill_s=first - started,
        decode_s=max(times.last_token - first, 0.0),
        reused_tokens=sequence.reused,
        drafted_tokens=sequence.drafted,
        accepted_tokens=sequence.accepted,
        preemptions=sequence.preemptions,
        miss=sequence.miss,
    )


def ended_stats(sequence: Sequence) -> EngineStats:
    """Its part of its engine's."""
    stats = request_stats(sequence)
    return EngineStats(
        requests=1,
        prompt_tokens=len(sequence.prompt),
        completion_tokens=len(sequence.tokens) - len(sequence.prompt),
        reused_tokens=stats.reused_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        preemptions=stats.preemptions,
        queued_s=stats.queued_s,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
    )
