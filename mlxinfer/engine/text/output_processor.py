"""Turns engine events into chunks, with one output per sequence."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import field, replace
from typing import Protocol

import mlx.core as mx

from ...errors import EngineError, ExpertReadError, SamplingError
from ...sampling.logprobs import logprobs_of
from ...tokenizer.tokenizer import Tokenizer
from ...types import Chunk, Completion, FinishReason, TokenLogprob, Usage
from ...util.dataclass import dataclass
from ...util.device import peak_memory
from ..core.engine import Engine
from ..core.events import Event, Logits, Token
from ..core.sequence import EXPERTS_FAILED, IMAGE_FAILED, Sequence, request_stats
from .chat_output import AnswerParts
from .input_processor import with_message
from .pooled_output import PooledOutput
from .stopping import LoopDetector, StopStrings


class Output(Protocol):
    """The output of one sequence."""

    sequence: Sequence

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return the reason of its end once all events were taken; None before."""
        ...

    def take(self, event: Event) -> Chunk:
        """Take the sequence's next event. The last chunk has the reason."""
        ...

    def completion(self) -> Completion:
        """Return the output so far, with the reason "cancelled" before its end."""
        ...


class RequestOutput:
    """An answer, collected token by token. Text is held back if it may be half a character or the start of a stop string."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        assert not isinstance(sequence.params.stop, str)
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._stops = StopStrings(sequence.params.stop or ())
        chat = sequence.chat
        self._spelled = frozenset() if chat is None else chat.spelled
        self._detokenizer = tokenizer.detokenizer(self._spelled)
        self._parts = None if chat is None else AnswerParts(chat.reader(), self._stops, f"{sequence.seed} {len(sequence.prompt)}")
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._reasoning_tokens = 0
        self._logprobs: list[TokenLogprob] | None = None if sequence.params.logprobs is None else []
        self._stopped = False
        self._loops = LoopDetector() if sequence.params.stop_on_loop else None
        self._looped = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """See `Output`. After a stop string or a loop the answer has ended, though the sequence still runs."""
        if self._stopped:
            return "stop"
        if self._looped:
            return "loop"
        # A step can give a sequence several tokens and end it before the first of them arrives here.
        arrived = len(self.sequence.prompt) + len(self._token_ids)
        return self.sequence.finish_reason if arrived >= len(self.sequence.tokens) else None

    def take(self, event: Event) -> Chunk:
        """Take a token and return the text that became certain, or the end. The last chunk has the reason and the usage."""
        if not isinstance(event, Token):
            return self._end()
        token = event
        self._token_ids.append(token.token_id)
        logprob = None
        if self._logprobs is not None and token.logprob is not None:
            logprob = _logprob(self._tokenizer, token.token_id, token.logprob, token.top)
            self._logprobs.append(logprob)
        is_end = token.token_id in self.sequence.stop_ids
        text = ""
        if not is_end or token.token_id in self._spelled:
            text = self._detokenizer.add(token.token_id)
            if self.sequence.params.stop and self._parts is None:
                text, self._stopped = self._stops.add(text)
        # Of several tokens of a step, only the last has the reason, though it is known with the first.
        is_last = self.sequence.finish_reason is not None and len(self._token_ids) == len(self.sequence.tokens) - len(self.sequence.prompt)
        if self._loops is not None and not is_last and self._loops.add(token.token_id):
            is_last = self._looped = True
        logprobs = None if logprob is None else [logprob]
        if self._parts is not None:
            return self._chat_chunk(text, [token.token_id], logprobs, is_last=is_last)
        if is_last and not self._stopped:
            text += self._held_back_text()
        self._pieces.append(text)
        reason = self.finish_reason if is_last or self._stopped else None
        return Chunk(text, [token.token_id], logprobs, reason, self.usage if reason else None, self.sequence.index, self._stops.met)

    def _end(self) -> Chunk:
        logprobs: list[TokenLogprob] | None = None if self._logprobs is None else []
        if self._parts is not None:
            return self._chat_chunk("", [], logprobs, is_last=True)
        text = self._held_back_text()
        self._pieces.append(text)
        return Chunk(text, [], logprobs, self.finish_reason, self.usage, self.sequence.index, self._stops.met)

    def _chat_chunk(self, text: str, token_ids: list[int], logprobs: list[TokenLogprob] | None, *, is_last: bool) -> Chunk:
        """A chunk of an answer in a chat, with its text divided into parts."""
        assert self._parts is not None
        part = self._parts.finish(text + self._detokenizer.finish()) if is_last else self._parts.add(text)
        if part.reasoning:
            self._reasoning_tokens = len(self._token_ids)
        self._stopped = self._stops.met is not None
        self._pieces.append(part.content)
        reason = self.finish_reason if is_last or self._stopped else None
        return Chunk(
            part.content,
            token_ids,
            logprobs,
            reason,
            self.usage if reason else None,
            self.sequence.index,
            self._stops.met,
            reasoning=part.reasoning,
            tool_calls=part.calls,
        )

    def _held_back_text(self) -> str:
        text, self._stopped = self._stops.add(self._detokenizer.finish())
        return text if self._stopped else text + self._stops.finish()

    @property
    def usage(self) -> Usage:
        """Usage of the request so far."""
        times, stats = self.sequence.times, request_stats(self.sequence)
        prompt, answer = len(self.sequence.prompt), len(self._token_ids)
        computed = prompt - stats.reused_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=answer,
            reasoning_tokens=self._reasoning_tokens,
            ttft_s=max(times.first_token - times.added, 0.0),
            prefill_tps=computed / stats.prefill_s if stats.prefill_s > 0 else 0.0,
            decode_tps=(answer - 1) / stats.decode_s if stats.decode_s > 0 else 0.0,
            peak_memory_bytes=peak_memory(),
            stats=replace(stats, miss=with_message(stats.miss, self.sequence.prompt, self._tokenizer.eos_token_ids)),
        )

    def completion(self) -> Completion:
        """See `Output`."""
        reason = self.finish_reason or "cancelled"
        text, index, parts = "".join(self._pieces), self.sequence.index, self._parts
        reasoning, calls = (None, ()) if parts is None else (parts.reasoning, parts.calls)
        return Completion(
            text, self._token_ids, reason, self.usage, self._logprobs, index, self._stops.met, reasoning=reasoning, tool_calls=calls
        )


class PromptOutput:
    """A scored prompt. Its chunks have no text, but log-probabilities of the prompt's tokens from the second on.

    If `SamplingParams.logprobs` is None, only the logits are wanted: sums over a whole vocabulary cost as much as the head."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprob] = []
        self._rows = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """See `Output`. The sequence ends before its last rows arrive here."""
        if self._rows >= len(self.sequence.prompt):
            return "stop"
        reason = self.sequence.finish_reason
        return None if reason == "stop" else reason

    def take(self, event: Event) -> Chunk:
        """Take the next rows of logits, or the end. A preempted sequence sends rows again, which are skipped. The very last row is for a
        token beyond the prompt."""
        found: list[TokenLogprob] = []
        if isinstance(event, Logits):
            rows = event.rows[max(self._rows - event.past, 0) :]
            ids = self.sequence.prompt[self._rows + 1 : self._rows + 1 + rows.shape[0]]
            self._rows += rows.shape[0]
            wanted = self.sequence.params.logprobs
            if wanted is None:
                mx.eval(rows)
            elif ids:
                read = logprobs_of(rows[: len(ids)], mx.array(ids, dtype=mx.uint32), wanted).read()
                found = [_logprob(self._tokenizer, i, own, top) for i, (own, top) in zip(ids, read, strict=True)]
        self._logprobs += found
        reason = self.finish_reason
        return Chunk("", prompt_logprobs=found, finish_reason=reason, usage=self._usage if reason else None)

    def completion(self) -> Completion:
        """See `Output`."""
        return Completion("", [], self.finish_reason or "cancelled", self._usage, prompt_logprobs=self._logprobs)

    @property
    def _usage(self) -> Usage:
        return Usage(len(self.sequence.prompt), 0)


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float, top: Iterable[tuple[int, float]]) -> TokenLogprob:
    text_of = tokenizer.token_text
    return TokenLogprob(token_id, text_of(token_id), logprob, tuple((i, text_of(i), value) for i, value in top))


def _output_of(sequence: Sequence, tokenizer: Tokenizer) -> Output:
    if sequence.pooling is not None:
        return PooledOutput(sequence)
    return (PromptOutput if sequence.wants_logits else RequestOutput)(sequence, tokenizer)


FEED = 4
"""Prompts of one `generate` in the engine at once, per running sequence. The waiting list keeps room for other callers."""


@dataclass(slots=True)
class OutputProcessor:
    """An engine and the outputs of its sequences. It belongs to the thread that owns the engine."""

    engine: Engine
    tokenizer: Tokenizer
    answers: dict[Sequence, Output] = field(default_factory=dict)
    """Outputs of sequences that have not ended."""
    rows: dict[Sequence, list[mx.array]] = field(default_factory=dict)
    """Logits, float32 `[rows, vocab]` each, collected for the sequences in this dict."""

    def submit(self, sequences: Many[Sequence]) -> list[Output]:
        """Queue a request. After `QueueFullError` or `MemoryPlanError` nothing has changed, and the call may be repeated."""
        self.engine.add(sequences[0])
        answers: list[Output] = [_output_of(s, self.tokenizer) for s in sequences]
        self.answers.update((answer.sequence, answer) for answer in answers)
        return answers

    def step(self) -> list[tuple[Output, Chunk]]:
        """Compute a step of the engine; return the new chunks with their outputs."""
        try:
            events = self.engine.step()
        except BaseException:  # the engine has ended all sequences
            self.answers.clear()
            self.rows.clear()
            raise
        pieces = []
        for event in events:
            if self.rows and isinstance(event, Logits) and event.sequence in self.rows:
                rows = self.rows[event.sequence]
                known = sum(part.shape[0] for part in rows)
                rows.append(event.rows[max(known - event.past, 0) :])  # a preempted sequence sends rows again
            answer = self.answers.get(event.sequence)
            if answer is None:
                continue
            chunk = answer.take(event)
            pieces.append((answer, chunk))
            if chunk.finish_reason:
                del self.answers[answer.sequence]
                if answer.sequence.finish_reason is None:
                    self.engine.abort(answer.sequence, "stop")
        return pieces

    def cancel(self, answers: Iterable[Output]) -> None:
        """End answers. Those that have ended stay as they are."""
        for answer in answers:
            if self.answers.pop(answer.sequence, None) is not None:
                self.engine.abort(answer.sequence)


def stopped(reason: str) -> EngineError:
    """The error for a request that was running when the engine stopped."""
    return EngineError(f"the engine stopped before the answer was finished: {reason}")


def fault_line(error: BaseException) -> str:
    """A fault of the engine in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_unbroken(sequences: Iterable[Sequence]) -> None:
    """Raise `EngineError` if a sequence ended with an error, or `SamplingError` if its structure caused it."""
    for sequence in sequences:
        if sequence.finish_reason == "error":
            if sequence.error.startswith("structure:"):
                raise SamplingError(f"{sequence.error}: the answer was ended")
            if sequence.error.startswith(IMAGE_FAILED):
                raise EngineError(sequence.error.removeprefix(IMAGE_FAILED))
            if sequence.error.startswith(EXPERTS_FAILED):
                raise ExpertReadError(sequence.error.removeprefix(EXPERTS_FAILED))
            raise EngineError(f"the answer was ended, which is a fault of the engine: {sequence.error}")
