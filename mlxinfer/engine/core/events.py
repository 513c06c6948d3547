"""Events that a step of the engine reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from ...util.dataclass import dataclass
from .sequence import Sequence

if TYPE_CHECKING:
    import mlx.core as mx

    from .schedule import Schedule, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Token:
    """A new token of a sequence."""

    sequence: Sequence
    token_id: int
    logprob: float | None = None
    """Its log-probability (natural), if the sequence wants it."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens, likeliest first."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of a sequence that wants them. A preempted sequence reports them again."""

    sequence: Sequence
    rows: mx.array
    """float32 `[rows, vocab]`."""
    past: int = 0
    """Position of the first row."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The part of a vector that comes from one chunk. A preempted sequence reports all parts again."""

    sequence: Sequence
    part: mx.array
    """float32 `[1, n]`, to add to the parts of earlier chunks."""
    past: int
    """Tokens before the chunk."""
    is_last: bool
    """True if the chunk ends the text."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence ended without a new token, at its deadline."""

    sequence: Sequence


Event = Union[Token, Logits, Pooled, Ended]


@dataclass(frozen=True, slots=True)
class StepReport:
    """The argument of `Engine.watch`, for each computed step."""

    schedule: Schedule
    """The scheduled rows, by sequence."""
    events: list[Event]
    began: float
    """Time when the device could start it, in seconds of `perf_counter`: submitted, and the step before ended."""
    ended: float
    """Time when its results were read, likewise."""
    waiting: int
    """Sequences that were waiting at that time."""


def token_events(w: ScheduledSequence, count: int) -> list[Event]:
    """The first `count` new tokens, with the log-probabilities that the sequence wants."""
    sequence, wanted = w.sequence, w.sequence.params.logprobs
    if wanted is None or w.logprobs is None:
        return [Token(sequence, token) for token in w.new_tokens[:count]]
    pairs = zip(w.new_tokens[:count], w.logprobs, strict=False)
    return [Token(sequence, token, chosen, top[:wanted]) for token, (chosen, top) in pairs]


def result_event(w: ScheduledSequence) -> Event:
    """The result of a sequence that is only read."""
    assert w.output is not None
    if w.sequence.pooling is None:
        return Logits(w.sequence, w.output, w.past)
    return Pooled(w.sequence, w.output, w.past, is_last=w.past + w.count == len(w.sequence.prompt))
