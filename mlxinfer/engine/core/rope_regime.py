"""Consequences for the engine of a rope whose angles depend on the sequence length (dynamic NTK, longrope)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...models.decoder import Model
    from .sequence import Sequence


class RopeRegime:
    """The rope of one model. With a plain rope nothing depends on the sequence.

    A regime is a range of lengths with equal rotations. Dynamic NTK keeps the regime in which a prompt was admitted, as transformers does.
    Longrope changes the rotations of all tokens once the sequence crosses `boundary`.
    """

    def __init__(self, model: Model) -> None:
        self.boundary = model.recompute_at
        """Length above which a whole sequence must be computed again; None if there is no such length."""
        self._rotation = model.rotation
        self._changes = model.rotation(1) != model.rotation(model.max_context)
        self._only_salt = self._salt(1)

    def cache_salt(self, sequence: Sequence) -> str | None:
        """The regime of its keys and values, as a salt; None if they must not be shared."""
        if not self._changes:
            return self._only_salt
        return None if self.token_by_token(sequence) else self._salt(sequence.rope_length)

    def must_restart(self, sequence: Sequence) -> bool:
        """True if the sequence has crossed the boundary since its computation started."""
        boundary = self.boundary
        return boundary is not None and sequence.rope_length <= boundary < sequence.num_tokens and sequence.remaining > 0

    def token_by_token(self, sequence: Sequence) -> bool:
        """True if tokens of its answer must be computed one at a time, because each is rotated for its own length."""
        if not self._changes or self.boundary is not None:
            return False
        return self._rotation(sequence.max_length) != self._rotation(sequence.rope_length)

    def draft_limit(self, sequence: Sequence) -> int:
        """Length that drafts must not reach, so that none crosses the boundary. There must be a boundary."""
        assert self.boundary is not None
        within = sequence.num_tokens <= self.boundary
        return min(sequence.max_length, self.boundary) if within else sequence.max_length

    def _salt(self, length: int) -> str:
        rotation = self._rotation(length)
        return f" {rotation}" if any(rotation) else ""
