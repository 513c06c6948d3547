"""A vocabulary as GGUF and SentencePiece store it: texts, scores and kinds of tokens, by id."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken

from ..errors import TokenizerError


class TokenType(IntEnum):
    """Kinds of tokens; SentencePiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """`scores` is empty where the model has merges; `types` has one `TokenType` value per token."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()

    def index(self) -> dict[str, int]:
        """Text to id. Raises `TokenizerError` where two ids have one text: the second could not be decoded."""
        index = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(index) != len(self.tokens):
            first = next(token_id for token_id, token in enumerate(self.tokens) if index[token] != token_id)
            raise TokenizerError(
                f"the vocabulary is corrupt: tokens {first} and {index[self.tokens[first]]} are both {self.tokens[first]!r}"
            )
        return index

    def unknown_token(self) -> str | None:
        return next((token for token, kind in zip(self.tokens, self.types, strict=True) if kind == TokenType.UNKNOWN), None)

    def added_tokens(self, rstrip: Collection[str] = ()) -> list[AddedToken]:
        """The tokens that are cut out of a text before anything else. Those in `rstrip` swallow the spaces after them."""
        return [
            AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False, rstrip=token in rstrip)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
