"""Rope whose angles depend on the length of the sequence (dynamic NTK, longrope): what the engine has to do differently there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...models.decoder import Model
    from .sequence import Sequence


class RopeRegime:
    """Answers for one model. With a plain rope every answer is the same for all sequences, and costs nothing.

    Lengths at which tokens are rotated alike form a regime. Dynamic NTK keeps the regime in which a prompt was admitted, as transformers
    does; longrope changes it for all tokens of a sequence once the sequence crosses `boundary`.
    """

    def __init__(self, model: Model) -> None:
        self.boundary = model.recompute_at
        """Tokens of a sequence above which all of it has to be computed again; None if there is no such length."""
        self._rotation = model.rotation
        self._changes = model.rotation(1) != model.rotation(model.max_context)
        self._only_salt = self._salt(1)

    def cache_salt(self, sequence: Sequence) -> str | None:
        """What its keys and values depend on besides its tokens; None if they must not be shared."""
        if not self._changes:
            return self._only_salt
        return None if self.token_by_token(sequence) else self._salt(sequence.rope_length)

    def must_restart(self, sequence: Sequence) -> bool:
        """Whether the sequence has crossed the boundary since it was last computed from its beginning."""
        boundary = self.boundary
        return boundary is not None and sequence.rope_length <= boundary < sequence.num_tokens and sequence.remaining > 0

    def token_by_token(self, sequence: Sequence) -> bool:
        """Whether tokens of its answer may only be computed one at a time: each was rotated for the length that the sequence had then."""
        if not self._changes or self.boundary is not None:
            return False
        return self._rotation(sequence.max_length) != self._rotation(sequence.rope_length)

    def draft_limit(self, sequence: Sequence) -> int:
        """Length that drafts must not reach: none may cross the boundary."""
        if self.boundary is not None and sequence.num_tokens <= self.boundary:
            return min(sequence.max_length, self.boundary)
        return sequence.max_length

    def _salt(self, length: int) -> str:
        rotation = self._rotation(length)
        return f" {rotation}" if any(rotation) else ""
