"""What a step of the engine reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from ...util.dataclass import dataclass
from .sequence import Sequence

if TYPE_CHECKING:
    import mlx.core as mx

    from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a sequence got."""

    sequence: Sequence
    """Whose token it is."""
    token_id: int
    """The token."""
    logprob: float | None = None
    """Its log-probability (natural), if the sequence asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens as (id, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of a sequence that wants them; the same come again if it had to give its pages back and start anew."""

    sequence: Sequence
    """Whose they are."""
    rows: mx.array
    """float32 `[rows, vocab]`."""
    past: int = 0
    """The position of the first row."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a chunk of a sequence adds to its vector; all of it comes again if it had to give its pages back."""

    sequence: Sequence
    """Whose it is."""
    part: mx.array
    """float32 `[1, n]`, to be added to those of the chunks before."""
    past: int
    """Tokens before the chunk."""
    is_last: bool
    """Whether the chunk ends the text."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence ended without a token: its time was up."""

    sequence: Sequence
    """Which one."""


Event = Union[Token, Logits, Pooled, Ended]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What `Engine.watch` is told of each step that was computed."""

    schedule: Schedule
    """What it computed: rows of prompts and of answers, by sequence."""
    events: list[Event]
    """What its sequences got."""
    began: float
    """When the device could begin with it, in seconds of `perf_counter`: it was submitted, and the step before it had ended."""
    ended: float
    """When its results were read, likewise."""
    waiting: int
    """Sequences that had no place at that time."""
