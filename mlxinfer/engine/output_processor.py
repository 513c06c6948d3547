"""An engine with the answers that it is writing: requests go in, pieces of text come out."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import mlx.core as mx

from ..device import peak_memory
from ..errors import MLXInferError
from ..sampling.logprobs import logprobs_of
from ..tokenizer.detokenizer import StopStrings
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk, Completion, FinishReason, TokenLogprob, Usage
from .engine import Engine
from .events import Event, Logits, Token
from .input_processor import with_message
from .sequence import Sequence, request_stats


class RequestOutput:
    """Collects one sequence's tokens. Text is held back while it may be half a character or the start of a stop string."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        assert not isinstance(sequence.params.stop, str)
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(sequence.params.stop or ())
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if sequence.params.logprobs is None else []
        self._stopped = False

    @property
    def finish_reason(self) -> FinishReason | None:
        if self._stopped:
            return "stop"
        # A step can give a sequence several tokens and end it, before the first of them arrives here.
        arrived = len(self.sequence.prompt) + len(self._token_ids)
        return self.sequence.finish_reason if arrived >= len(self.sequence.tokens) else None

    def add(self, token: Token) -> Chunk:
        """The next token, and the text that became certain with it; the last chunk carries the reason and the usage."""
        self._token_ids.append(token.token_id)
        logprob = self._logprob(token)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        is_end = token.token_id in self.sequence.stop_ids
        text = ""
        if not is_end:
            text = self._detokenizer.add(token.token_id)
            if self.sequence.params.stop:
                text, self._stopped = self._stops.add(text)
        # A step may bring several tokens: what ends the sequence is known with the first of them, and holds for the last.
        is_last = self.sequence.finish_reason is not None and len(self._token_ids) == len(self.sequence.tokens) - len(self.sequence.prompt)
        if is_last and not self._stopped:
            text += self._rest()
        self._pieces.append(text)
        reason = self.finish_reason if is_last or self._stopped else None
        logprobs = None if logprob is None else [logprob]
        return Chunk(text, [token.token_id], logprobs, reason, self.usage if reason else None, self.sequence.index, self._stops.met)

    def end(self) -> Chunk:
        """The last chunk of an answer that ended without a further token."""
        text = self._rest()
        self._pieces.append(text)
        logprobs: list[TokenLogprob] | None = None if self._logprobs is None else []
        return Chunk(text, [], logprobs, self.finish_reason, self.usage, self.sequence.index, self._stops.met)

    def _rest(self) -> str:
        text, self._stopped = self._stops.add(self._detokenizer.finish())
        return text if self._stopped else text + self._stops.finish()

    def _logprob(self, token: Token) -> TokenLogprob | None:
        if token.logprob is None:
            return None
        text_of = self._tokenizer.token_text
        top = tuple((i, text_of(i), value) for i, value in token.top)
        return TokenLogprob(token.token_id, text_of(token.token_id), token.logprob, top)

    @property
    def usage(self) -> Usage:
        times, stats = self.sequence.times, request_stats(self.sequence)
        prompt, answer = len(self.sequence.prompt), len(self._token_ids)
        computed = prompt - stats.reused_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=answer,
            ttft_s=max(times.first_token - times.added, 0.0),
            prefill_tps=computed / stats.prefill_s if stats.prefill_s > 0 else 0.0,
            decode_tps=(answer - 1) / stats.decode_s if stats.decode_s > 0 else 0.0,
            peak_memory_bytes=peak_memory(),
            stats=replace(stats, miss=with_message(stats.miss, self.sequence.prompt, self._tokenizer.eos_token_ids)),
        )

    def completion(self) -> Completion:
        """What there is so far; "cancelled" if it has not ended by itself."""
        reason = self.finish_reason or "cancelled"
        text, index = "".join(self._pieces), self.sequence.index
        return Completion(text, self._token_ids, reason, self.usage, self._logprobs, index, self._stops.met)


class PromptScore(RequestOutput):
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


FEED = 4
"""Prompts of one `generate` that are in the engine at once, for each sequence that can run: so the waiting list keeps room for others."""


@dataclass(slots=True)
class OutputProcessor:
    """Belongs to the thread that owns the engine."""

    engine: Engine
    tokenizer: Tokenizer
    answers: dict[Sequence, RequestOutput] = field(default_factory=dict)
    """Those that have not ended."""
    rows: dict[Sequence, list[mx.array]] = field(default_factory=dict)
    """Logits of the sequences that are in here, as they come."""

    def submit(self, sequences: Many[Sequence]) -> list[RequestOutput]:
        """Put a request on the engine's waiting list. Raises `QueueFullError` and `MemoryPlanError`; nothing of it is left then, and it may
        be tried again."""
        samples_to_fork = sequences[0].samples_to_fork
        try:
            self.engine.add(sequences[0])
        except MLXInferError:
            for sequence in sequences:
                self.engine.scheduler.remove(sequence)
            sequences[0].samples_to_fork = samples_to_fork
            raise
        answers = [(PromptScore if s.wants_logits else RequestOutput)(s, self.tokenizer) for s in sequences]
        self.answers.update((answer.sequence, answer) for answer in answers)
        return answers

    def step(self) -> list[tuple[RequestOutput, Chunk]]:
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

    def cancel(self, answers: Iterable[RequestOutput]) -> None:
        """Answers that have ended are left as they are."""
        for answer in answers:
            if self.answers.pop(answer.sequence, None) is not None:
                self.engine.abort(answer.sequence)


def _chunk(answer: RequestOutput, event: Event) -> Chunk:
    if isinstance(event, Token):
        return answer.add(event)
    if isinstance(event, Logits):
        assert isinstance(answer, PromptScore)
        return answer.add_rows(event.past, event.rows)
    return answer.end()
