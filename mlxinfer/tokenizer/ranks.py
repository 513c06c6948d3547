"""Byte-level BPE from tokens with ranks, the form of the library tiktoken, for `tiktoken.model` and `tekken.json`.

tiktoken repeatedly joins the neighbours whose joined bytes have the lowest rank, leftmost first; a word that is a token stays whole.
`tokenizers` ranks pairs instead. Each pair of tokens that makes a token therefore becomes a merge, in the order of the ranks
(transformers' `TikTokenConverter`).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ..errors import TokenizerError
from .detokenizer import byte_alphabet
from .vocab import TokenType, Vocabulary, pairs_that_make

_MOST_TOKENS = 1 << 20
_LONGEST_TOKEN = 512
"""Bytes; the longest token of a real vocabulary has 128."""
_LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


class RankedMerges:
    """Implements `Merges` for a vocabulary whose tokens `first .. end` are ordered by rank; other tokens are not merged."""

    def __init__(self, vocabulary: Vocabulary, first: int, end: int) -> None:
        self._vocabulary, self._first, self._end = vocabulary, first, end

    def whole(self) -> list[tuple[str, str]]:
        return pairs_that_make(self._vocabulary.tokens[self._first : self._end])

    def among(self, pieces: Mapping[str, int]) -> list[tuple[str, str]]:
        return pairs_that_make([piece for piece, token_id in pieces.items() if self._first <= token_id < self._end])


def decoded(path: Path, tokens: Sequence[bytes | str]) -> list[bytes]:
    """Return the bytes of tokens in base64. Raises `TokenizerError`."""
    try:
        return [b64decode(token, validate=True) for token in tokens]
    except (ValueError, TypeError) as error:
        raise TokenizerError(f"{path} is corrupt: a token is not written in base64 ({error})") from error


def ranked_vocabulary(path: Path, ranked: Sequence[bytes], first: int, others: Mapping[int, tuple[str, TokenType]]) -> Vocabulary:
    """Return a vocabulary of `ranked` tokens from id `first`, and `others` by id. Raises `TokenizerError`."""
    _check(path, ranked)
    letters = b"".join(ranked).decode("latin-1").translate(_LETTERS)
    ends = accumulate(map(len, ranked), initial=0)
    spelled = [letters[start:end] for start, end in pairwise(ends)]
    before = [others[token_id][0] for token_id in range(first)]
    after = [others[token_id][0] for token_id in range(first + len(ranked), len(ranked) + len(others))]
    types = np.full(len(ranked) + len(others), TokenType.NORMAL)
    for token_id, (_, kind) in others.items():
        types[token_id] = kind
    vocabulary = Vocabulary([*before, *spelled, *after], types, np.array([]))
    vocabulary.index()
    return vocabulary


def _check(path: Path, ranked: Sequence[bytes]) -> None:
    if len(ranked) > _MOST_TOKENS:
        raise TokenizerError(f"{path} is not a vocabulary: it has {len(ranked)} tokens")
    longest = max(map(len, ranked), default=0)
    if longest > _LONGEST_TOKEN or b"" in ranked:
        raise TokenizerError(f"{path} is corrupt: it has a token of {longest if longest > _LONGEST_TOKEN else 0} bytes")
    missing = {bytes([byte]) for byte in range(256)} - set(ranked)
    if missing:
        raise TokenizerError(f"{path} is corrupt: {len(missing)} of the 256 bytes are not tokens")
