"""Text from token ids, one at a time."""

from __future__ import annotations

import codecs

from .pieces import Pieces


class Detokenizer:
    """Turns a stream of token ids into text; never emits half a character.

    The pieces joined are the decoding of the whole. The cost of a token does not grow with the text before it.
    """

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._to_strip = pieces.strip_left

    def add(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        if self._skip_special and self._pieces.is_special(token_id):
            return ""
        piece = self._pieces.piece(token_id, first=not self._begun)
        if piece is None:
            return ""
        if self._begun:
            piece = self._pieces.separator + piece
        self._begun = True
        text = self._utf8.decode(piece)
        return self._strip(text) if self._to_strip else text

    def finish(self) -> str:
        """What is left when the stream ends; bytes that never became a character are U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        spaces = min(self._to_strip, len(text) - len(text.lstrip(" ")))
        self._to_strip = self._to_strip - spaces if spaces == len(text) else 0
        return text[spaces:]
