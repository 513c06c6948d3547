"""What a step of the engine tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from .sequence import Sequence

if TYPE_CHECKING:
    import mlx.core as mx

    from .model_runner import SequenceOutput


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a sequence got: its id, and if asked for its log-probability and the likeliest ones as (id, logprob)."""

    sequence: Sequence
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits `[rows, vocab]` float32 of the rows from `past` on of a sequence that wants them; the same again if it had to start anew."""

    sequence: Sequence
    rows: mx.array
    past: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that ended without a token: its time was up."""

    sequence: Sequence


Event = Union[Token, Logits, Ended]


def token_of(drawn: SequenceOutput, i: int) -> Token:
    """The i-th token that a sequence got from a step."""
    sequence = drawn.draw.sequence
    wanted = sequence.params.logprobs
    if wanted is None or drawn.logprobs is None:
        return Token(sequence, drawn.tokens[i])
    chosen, top = drawn.logprobs[i]
    return Token(sequence, drawn.tokens[i], chosen, top[:wanted])
