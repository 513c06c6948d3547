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
    bytes_of = tokenizer.token_bytes
    return [
        ContentLogprob(
            token=one.text,
            logprob=finite(one.logprob),
            bytes=list(bytes_of(one.token_id)),
            top_logprobs=[TopLogprob(token=text, logprob=finite(value), bytes=list(bytes_of(i))) for i, text, value in one.top],
        )
        for one in logprobs
    ]


def finite(logprob: float) -> float:
    """JSON has no infinity: -9999 stands for impossible, as in OpenAI's answers."""
    return max(logprob, -9999.0)
