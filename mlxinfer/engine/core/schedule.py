"""A step as the scheduler chose it, and what its sequences got from it."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ...util.dataclass import dataclass

if TYPE_CHECKING:
    import mlx.core as mx

    from ...sampling import TokenLogprobs
    from .sequence import Proposed, Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """The part of one sequence in a step. The scheduler sets the first four fields, `ModelRunner.submit` and `PendingStep` the others."""

    sequence: Sequence
    count: int
    """Rows, drafts included."""
    num_drafts: int = 0
    """Drafts that are verified: the last rows."""
    samples: bool = False
    """True if the rows reach the end of the known tokens, so that the next token is sampled."""
    past: int = 0
    """Tokens computed before the step."""
    first_row: int = 0
    """Its first row among the sampled rows of the step: one, and one more for each draft."""
    proposed: Proposed = field(default_factory=list)
    """The drafts that are verified."""
    output: mx.array | None = None
    """Of a sequence that is only read: logits, float32 `[count, vocab]`, or the pooled rows, float32 `[1, n]`."""
    new_tokens: list[int] = field(default_factory=list)
    """Accepted drafts, and the token sampled after them."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `new_tokens`; None if no row of the step has any."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The next step. If it is empty, the sequences in `preempt` must free their pages before there can be one."""

    work: list[ScheduledSequence] = field(default_factory=list)
    """One for each sequence: answers first, then prompts."""
    preempt: list[Sequence] = field(default_factory=list)
    decode_rows: int = 0
    """Rows of answers: one each, and drafts."""
    prefill_rows: int = 0
    """Rows of prompts."""
    drafts: int = 0
    """Rows that are drafts."""

    @property
    def at_snapshot(self) -> bool:
        """True if a prompt is computed up to one of its snapshot points."""
        return any(w.sequence.num_computed_tokens in w.sequence.snapshot_points for w in self.work)
