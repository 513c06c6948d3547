"""What all requests of an engine took together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..types import EngineStats, RequestStats

if TYPE_CHECKING:
    from ..cache.pool import PoolUsage
    from .sequence import Sequence


@dataclass(slots=True)
class Totals:
    """Sums over the sequences that have ended."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0

    def add(self, sequence: Sequence) -> None:
        stats = request_stats(sequence)
        self.requests += 1
        self.prompt_tokens += len(sequence.prompt)
        self.completion_tokens += len(sequence.tokens) - len(sequence.prompt)
        for name in ("reused_tokens", "drafted_tokens", "accepted_tokens", "preemptions", "queued_s", "prefill_s", "decode_s"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))

    def stats(self, usage: PoolUsage, running: int, waiting: int) -> EngineStats:
        sums = {name: getattr(self, name) for name in self.__slots__}
        return EngineStats(**sums, running=running, waiting=waiting, pages=usage.pages, pages_used=usage.used, pages_cached=usage.cached)


def request_stats(sequence: Sequence) -> RequestStats:
    """What a sequence took so far. Times that have not begun are zero."""
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
