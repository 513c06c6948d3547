"""Vocabulary of GGUF and SentencePiece: texts, scores and types of tokens, by id."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np
from tokenizers import AddedToken

from ..errors import TokenizerError
from ..util.dataclass import dataclass

_NO_SEPARATORS = bytes(set(range(256)) - {0, ord(" ")})
"""All bytes except the separators between merges and between their halves."""


def split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Split each merge at its space into a pair of tokens. Raises `TokenizerError` for a text without two tokens."""
    joined = "\0".join(merges)
    halves = joined.replace(" ", "\0").split("\0")
    # One split of all merges takes less than half the time. It is correct if spaces and zeros alternate: tokens contain neither.
    if joined.encode().translate(None, _NO_SEPARATORS) == b" \0" * (len(merges) - 1) + b" " and all(halves):
        return list(zip(halves[::2], halves[1::2], strict=True))
    return list(map(_split_merge, merges))


def _split_merge(merge: str) -> tuple[str, str]:
    """Split one merge. The left token is never empty, so a leading space belongs to it."""
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise TokenizerError(f"the vocabulary is corrupt: {merge!r} is not a merge of two tokens")
    return merge[:at], merge[at + 1 :]


def pairs_that_make(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of these pieces that make one of them, in the order of the result; for one result, the longest left side first.

    If two such pairs overlap, as in a run of one character, the left pair is the one with the longer left side.
    """
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in known and piece[cut:] in known
    ]


class TokenType(IntEnum):
    """Types of tokens, with the numbers of SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


CUT_OUT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
"""Types of tokens that are matched before a text is split into words."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model, in arrays because a Python loop over 250,000 tokens would dominate the load time."""

    tokens: Sequence[str]
    types: np.ndarray
    """`TokenType` of each token, integers `[tokens]`."""
    scores: np.ndarray
    """Scores `[tokens]`, where higher wins in SentencePiece; `[0]` for a model with merges."""

    def index(self) -> dict[str, int]:
        """Return text to id. Raises `TokenizerError` if two ids have one text, because the second could not be decoded."""
        index = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(index) != len(self.tokens):
            first = next(token_id for token_id, token in enumerate(self.tokens) if index[token] != token_id)
            raise TokenizerError(
                f"the vocabulary is corrupt: tokens {first} and {index[self.tokens[first]]} are both {self.tokens[first]!r}"
            )
        return index

    def ids(self, *kinds: TokenType) -> list[int]:
        """Return the ids of tokens of these types, in order."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return ids

    def unknown_id(self) -> int | None:
        return next(iter(self.ids(TokenType.UNKNOWN)), None)

    def added_tokens(self, rstrip: Collection[str] = ()) -> list[AddedToken]:
        """Return the tokens of the types `CUT_OUT`. Those in `rstrip` strip the spaces after them."""
        return [
            AddedToken(token, special=self.types[token_id] != TokenType.USER_DEFINED, normalized=False, rstrip=token in rstrip)
            for token_id in self.ids(*CUT_OUT)
            for token in [self.tokens[token_id]]
        ]
