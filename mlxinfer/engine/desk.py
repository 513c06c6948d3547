"""An engine with the answers that it is writing: requests go in, pieces of text come out."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import mlx.core as mx

from ..errors import MLXInferError
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk
from .answer import Answer
from .engine import Engine
from .events import Event, Logits, Token
from .scoring import Score
from .sequence import Sequence

FEED = 4
"""Prompts of one `generate` that are in the engine at once, for each sequence that can run: so the waiting list keeps room for others."""


@dataclass(slots=True)
class Desk:
    """Belongs to the thread that owns the engine."""

    engine: Engine
    tokenizer: Tokenizer
    answers: dict[Sequence, Answer] = field(default_factory=dict)
    """Those that have not ended."""
    rows: dict[Sequence, list[mx.array]] = field(default_factory=dict)
    """Logits of the sequences that are in here, as they come."""

    def submit(self, sequences: Many[Sequence]) -> list[Answer]:
        """Put a request on the engine's waiting list. Raises `QueueFullError` and `MemoryPlanError`; nothing of it is left then, and it may
        be tried again."""
        followers = sequences[0].followers
        try:
            self.engine.add(sequences[0])
        except MLXInferError:
            for sequence in sequences:
                self.engine.scheduler.remove(sequence)
            sequences[0].followers = followers
            raise
        answers = [(Score if s.wants_logits else Answer)(s, self.tokenizer) for s in sequences]
        self.answers.update((answer.sequence, answer) for answer in answers)
        return answers

    def step(self) -> list[tuple[Answer, Chunk]]:
        """One step of the engine, and what the answers got from it."""
        pieces = []
        for event in self._events():
            if isinstance(event, Logits) and event.sequence in self.rows:
                self.rows[event.sequence].append(event.rows)
            answer = self.answers.get(event.sequence)
            if answer is None:
                continue
            chunk = _chunk(answer, event)
            pieces.append((answer, chunk))
            if chunk.finish_reason:
                del self.answers[answer.sequence]
                if answer.sequence.finish_reason is None:
                    self.engine.abort(answer.sequence, "stop")
        return pieces

    def _events(self) -> list[Event]:
        try:
            return self.engine.step()
        except BaseException:  # the engine has ended all of them
            self.answers.clear()
            self.rows.clear()
            raise

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Answers that have ended are left as they are."""
        for answer in answers:
            if self.answers.pop(answer.sequence, None) is not None:
                self.engine.abort(answer.sequence)


def _chunk(answer: Answer, event: Event) -> Chunk:
    if isinstance(event, Token):
        return answer.add(event)
    if isinstance(event, Logits):
        assert isinstance(answer, Score)
        return answer.add_rows(event.past, event.rows)
    return answer.end()
