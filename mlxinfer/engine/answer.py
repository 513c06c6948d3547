"""From a sequence's tokens to the text that a person sees."""

from __future__ import annotations

from dataclasses import replace

from ..device import peak_memory
from ..tokenizer.stop import StopStrings
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk, Completion, FinishReason, TokenLogprob, Usage
from .events import Token
from .intake import with_message
from .sequence import Sequence
from .stats import request_stats


class Answer:
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
