"""Which sequences get how many tokens in the next step. Knows counts and nothing of arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MemoryPlanError

if TYPE_CHECKING:
    from .sequence import Sequence

Fits = Callable[[int, Many[int]], bool]
"""Whether a sequence of so many tokens fits beside others of so many."""


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `count` tokens of a sequence, the last `drafts` of which are proposed, and verified by this."""

    sequence: Sequence
    count: int
    drafts: int = 0

    @property
    def samples(self) -> bool:
        """Whether this reaches the end of what is known, so that the next token can be chosen."""
        return self.sequence.num_computed + self.count - self.drafts == self.sequence.num_tokens and not self.sequence.wants_logits


class Scheduler:
    """First come, first served. A sequence is admitted when all it may grow to fits, so that it never has to be thrown out."""

    def __init__(self, *, max_step_tokens: int, max_sequences: int, fits: Fits) -> None:
        self.max_step_tokens = max_step_tokens
        self.max_sequences = max_sequences
        self.fits = fits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Put a sequence on the waiting list. Raises `MemoryPlanError` if it could not run even alone."""
        if not self.fits(sequence.limit, ()):
            raise MemoryPlanError(
                f"a sequence of up to {sequence.limit} tokens does not fit in the cache's memory: lower max_tokens or the context length"
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        for group in (self.running, self.waiting):
            if sequence in group:
                group.remove(sequence)

    def admit(self) -> list[Sequence]:
        """Move sequences from waiting to running while there is room; the caller gives them slots."""
        admitted = []
        while self.waiting and len(self.running) < self.max_sequences:
            if not self.fits(self.waiting[0].limit, [s.limit for s in self.running]):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def schedule(self) -> list[Work]:
        """The next step: sequences that need one token come first, prompts share what is left of the budget in order of arrival."""
        budget = self.max_step_tokens
        ready = [s for s in self.running if s.remaining]
        work = []
        for sequence in sorted(ready, key=lambda s: s.remaining > 1):
            count = min(sequence.remaining, budget)
            if sequence.num_computed < sequence.fork_point:
                count = min(count, sequence.fork_point - sequence.num_computed)
            if count == sequence.remaining:
                drafts = min(len(sequence.drafts), budget - count)
                work.append(Work(sequence, count + drafts, drafts))
                budget -= count + drafts
            elif count:
                work.append(Work(sequence, count))
                budget -= count
        return work
