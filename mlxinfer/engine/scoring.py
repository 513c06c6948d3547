"""How likely a text is: the log-probability of each token of a prompt, after those before it."""

from __future__ import annotations

import mlx.core as mx

from ..sampling.logprobs import logprobs_of
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk, FinishReason, TokenLogprob, Usage
from .answer import Answer
from .sequence import Sequence


class Score(Answer):
    """In place of an answer: its chunks have no text, but the log-probabilities of the prompt's tokens from the second on."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        super().__init__(sequence, tokenizer)
        self._row = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """The sequence is known to end before the last rows have been looked at."""
        done = self._row >= len(self.sequence.prompt)
        return "stop" if done else self.sequence.finish_reason if self.sequence.finish_reason != "stop" else None

    def add_rows(self, past: int, rows: mx.array) -> Chunk:
        """Rows of logits `[R, vocab]` from position `past` on. A sequence that gave up its place begins again: what is known is left out.
        The last row of all is for a token that is not in the prompt."""
        rows = rows[max(self._row - past, 0) :]
        ids = self.sequence.prompt[self._row + 1 : self._row + 1 + rows.shape[0]]
        self._row += rows.shape[0]
        found = logprobs_of(rows[: len(ids)], mx.array(ids, dtype=mx.uint32), self.sequence.params.logprobs or 0).read() if ids else []
        text_of = self._tokenizer.token_text
        logprobs = [
            TokenLogprob(i, text_of(i), own, tuple((j, text_of(j), value) for j, value in top))
            for i, (own, top) in zip(ids, found, strict=True)
        ]
        reason = self.finish_reason
        return Chunk("", [], logprobs, reason, self.usage if reason else None)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.sequence.prompt), 0)
