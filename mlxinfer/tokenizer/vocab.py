"""A vocabulary as GGUF and SentencePiece store it: texts, scores and kinds of tokens, by id."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np
from tokenizers import AddedToken

from ..errors import TokenizerError
from ..util.dataclass import dataclass

_NO_SEPARATORS = bytes(set(range(256)) - {0, ord(" ")})
"""All bytes but those between merges and between their halves."""


def split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Each merge, two tokens with a space between them, as a pair. Raises `TokenizerError` for a text without two tokens."""
    joined = "\0".join(merges)
    halves = joined.replace(" ", "\0").split("\0")
    # Splitting all at once takes less than half the time. It is right where spaces and zeros alternate: no token contains either.
    if joined.encode().translate(None, _NO_SEPARATORS) == b" \0" * (len(merges) - 1) + b" " and all(halves):
        return list(zip(halves[::2], halves[1::2], strict=True))
    return list(map(_split_merge, merges))


def _split_merge(merge: str) -> tuple[str, str]:
    """The left side is never empty, so a space at the beginning belongs to it."""
    at = merge.find(" ", 1)
    if at < 0 or at == len(merge) - 1:
        raise TokenizerError(f"the vocabulary is corrupt: {merge!r} is not a merge of two tokens")
    return merge[:at], merge[at + 1 :]


def pairs_that_make(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of these pieces that make one of them, in the order of what they make; of one piece, the longest left side first.

    Where two such pairs overlap, as in a run of one character, the left one is the one with the longer left side.
    """
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in known and piece[cut:] in known
    ]


class TokenType(IntEnum):
    """Types of tokens; SentencePiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


CUT_OUT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
"""The types whose tokens are found in a text before it is cut into words."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model. Columns are arrays, because a Python loop over a quarter of a million tokens would dominate the load time."""

    tokens: Sequence[str]
    """The text of each token, by id."""
    types: np.ndarray
    """Integers `[tokens]`: the `TokenType` of each."""
    scores: np.ndarray
    """Numbers `[tokens]`: higher wins in SentencePiece; `[0]` where the model has merges instead."""

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
        """Ids of the tokens of these types, in order."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return ids

    def unknown_id(self) -> int | None:
        return next(iter(self.ids(TokenType.UNKNOWN)), None)

    def added_tokens(self, rstrip: Collection[str] = ()) -> list[AddedToken]:
        """The tokens of the types `CUT_OUT`. Those in `rstrip` swallow the spaces after them."""
        return [
            AddedToken(token, special=self.types[token_id] != TokenType.USER_DEFINED, normalized=False, rstrip=token in rstrip)
            for token_id in self.ids(*CUT_OUT)
            for token in [self.tokens[token_id]]
        ]
