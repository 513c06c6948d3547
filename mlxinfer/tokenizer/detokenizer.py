"""Text from token ids, one at a time."""

from __future__ import annotations


class Detokenizer:
    """Turns a stream of token ids into text; never emits half a character."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        raise NotImplementedError

    def finish(self) -> str:
        """What is left when the stream ends; bytes that never became a character are U+FFFD."""
        raise NotImplementedError
