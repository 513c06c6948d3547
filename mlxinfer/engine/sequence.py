"""One sequence being generated: how far it is known, and how far it is computed. There are no phases."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from ..types import EngineStats, FinishReason, RequestStats, SamplingParams

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens `0 .. num_computed_tokens` have their keys and values in the cache (or in a step under way); tokens up to `num_tokens` are
    known, of which the host has read `tokens` and the device holds at most one more, `pending_token`.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    """Tokens at which it ends: prompt plus `max_tokens`, within the context."""
    stop_ids: frozenset[int] = frozenset()
    index: int = 0
    wants_logits: bool = False
    samples_to_fork: list[Sequence] = field(default_factory=list)
    """Further samples of the same prompt: they fork from this one before its last prompt token is computed."""
    client_id: str = ""
    priority: int = 0
    """Lower is served first."""
    deadline: float | None = None
    """In seconds of `perf_counter`."""
    cache_salt: str = ""
    snapshot_points: tuple[int, ...] = ()
    """Lengths of the prompt at which a message ends: what is computed up to there is kept for reuse."""

    tokens: list[int] = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    total: int = field(init=False)
    """Length that length-dependent rope variants go by: that of the prompt when it was admitted."""
    pending_token: mx.array | None = None
    drafts: list[int] | mx.array = field(default_factory=list)
    """Tokens proposed behind the last known one, for the next step to verify; a draft model's are on the device, uint32 `[k]`."""
    arrival: int = 0
    """Its place in the order of arrival, which it keeps when it is preempted."""
    slot: int | None = None
    finish_reason: FinishReason | None = None
    times: Times = field(init=False)
    no_chunked_recompute: bool = False
    """Tokens of its answer have to be recomputed one at a time: their rotation depends on how long the sequence was."""
    reused: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    miss: str = ""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_tokens = self.total = len(self.prompt)
        self.times = Times()

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens left to compute before the next one can be sampled; none when the last one is already on its way."""
        if self.finish_reason or (self.num_tokens >= self.limit and not self.wants_logits):
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def fork_point(self) -> int:
        """Where a chunk has to end so that the followers can fork there; 0 if there is no such place."""
        return len(self.prompt) - 1 if self.samples_to_fork else 0


@dataclass(slots=True)
class Times:
    """When what happened, in seconds of `perf_counter`."""

    added: float = field(default_factory=perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


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
