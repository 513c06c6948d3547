"""Log-probabilities of tokens, in the shape of chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from ...tokenizer import Tokenizer
from ...types import TokenLogprob


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    content: list[ContentLogprob]
    refusal: None


def token_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs(content=content_logprobs(tokenizer, logprobs), refusal=None)


def content_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[ContentLogprob]:
    def bytes_of(token_id: int) -> list[int]:
        return list(tokenizer.token_bytes(token_id) or b"")

    return [
        ContentLogprob(
            token=one.text,
            logprob=finite(one.logprob),
            bytes=bytes_of(one.token_id),
            top_logprobs=[TopLogprob(token=text, logprob=finite(value), bytes=bytes_of(i)) for i, text, value in one.top],
        )
        for one in logprobs
    ]


def finite(logprob: float) -> float:
    """JSON has no infinity: -9999 stands for impossible, as in OpenAI's answers."""
    return max(logprob, -9999.0)


class TextLogprobs(TypedDict):
    """`text_offset`: characters of the choice's text before each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class LegacyLogprobs:
    """The shape of completions, for one choice whose tokens come one after another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._characters = 0

    def of_prompt(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        """Nothing comes before the first token, so it has no probability."""
        first = prompt[0]
        text = self._tokenizer.token_text(first)
        begin = TextLogprobs(tokens=[text], token_logprobs=[None], top_logprobs=[None], text_offset=[self._place(first)])
        return self.joined(begin, logprobs)

    def joined(self, before: TextLogprobs | None, logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        after = self.more(logprobs)
        if before is None:
            return after
        return TextLogprobs(
            tokens=before["tokens"] + after["tokens"],
            token_logprobs=before["token_logprobs"] + after["token_logprobs"],
            top_logprobs=before["top_logprobs"] + after["top_logprobs"],
            text_offset=before["text_offset"] + after["text_offset"],
        )

    def more(self, logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        """The token itself is among the likeliest, even if it was not."""
        return TextLogprobs(
            tokens=[one.text for one in logprobs],
            token_logprobs=[finite(one.logprob) for one in logprobs],
            top_logprobs=[_by_text(one) for one in logprobs],
            text_offset=[self._place(one.token_id) for one in logprobs],
        )

    def _place(self, token_id: int) -> int:
        place = self._characters
        self._characters += len(self._detokenizer.add(token_id))
        return place


def _by_text(one: TokenLogprob) -> dict[str, float]:
    """Of tokens that look the same, the likeliest counts."""
    found = {text: finite(value) for _, text, value in reversed(one.top)}
    found.setdefault(one.text, finite(one.logprob))
    return found
