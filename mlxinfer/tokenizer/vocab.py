"""A vocabulary as GGUF and SentencePiece store it: texts, scores and kinds of tokens, by id."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from ..errors import TokenizerError
from .pretokenizers import PreTokenization


def build_byte_level(vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenization) -> Tokenizer:
    """`merges` are pairs joined by a space, best first."""
    model = models.BPE(vocabulary.index(), split_merges(merges), ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens())
    return tokenizer


def split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of tokens from texts in which a space stands between the two. Raises `TokenizerError` for a text that is no such pair."""
    joined = "\0".join(merges)
    halves = joined.replace(" ", "\0").split("\0")
    # Splitting all at once takes a third of the time. It is right if spaces and zeros alternate, so if no token has one of them in it.
    separators = np.frombuffer(joined.encode(), np.uint8)
    separators = separators[(separators == 0) | (separators == ord(" "))]
    if len(halves) == 2 * len(merges) and all(halves) and not separators[1::2].any() and separators[::2].all():
        return list(zip(halves[::2], halves[1::2], strict=True))
    return list(map(_split_merge, merges))


def _split_merge(merge: str) -> tuple[str, str]:
    """The left side is never empty, so a space at the beginning belongs to it."""
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise TokenizerError(f"the vocabulary is corrupt: {merge!r} is not a merge of two tokens")
    return merge[:at], merge[at + 1 :]


class TokenType(IntEnum):
    """Kinds of tokens; SentencePiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


CUT_OUT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
"""The kinds that are cut out of a text before anything else."""


@dataclass(frozen=True)
class Vocabulary:
    """`types` has one `TokenType` value per token, `scores` one number, or none at all where the model has merges.

    Both are arrays, because going through a quarter of a million tokens in Python is what loading a tokenizer takes its time for.
    """

    tokens: Sequence[str]
    types: np.ndarray
    scores: np.ndarray

    def index(self) -> dict[str, int]:
        """Text to id. Raises `TokenizerError` where two ids have one text: the second could not be decoded."""
        index = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(index) != len(self.tokens):
            first = next(token_id for token_id, token in enumerate(self.tokens) if index[token] != token_id)
            raise TokenizerError(
                f"the vocabulary is corrupt: tokens {first} and {index[self.tokens[first]]} are both {self.tokens[first]!r}"
            )
        return index

    def ids(self, *kinds: TokenType) -> list[int]:
        """The tokens of these kinds, in order."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return ids

    def unknown_id(self) -> int | None:
        return next(iter(self.ids(TokenType.UNKNOWN)), None)

    def added_tokens(self, rstrip: Collection[str] = ()) -> list[AddedToken]:
        """The tokens that are cut out of a text before anything else. Those in `rstrip` swallow the spaces after them."""
        return [
            AddedToken(token, special=self.types[token_id] != TokenType.USER_DEFINED, normalized=False, rstrip=token in rstrip)
            for token_id in self.ids(*CUT_OUT)
            for token in [self.tokens[token_id]]
        ]
