"""What one answer may still say: a value on its sequence, on the host only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Constraint(Protocol):
    """The engine's view. It follows the tokens that the host has read, and is never told of those that are on the device only."""

    def advance(self, token: int) -> str:
        """Take the next token of the answer. Returns why it is not allowed, or nothing."""
        ...

    def rows(self, drafts: Sequence[int]) -> np.ndarray | None:
        """Which tokens may follow, after the answer so far and after each further draft: bits of int32 `[1 + drafts, vocab / 32]`, lowest
        first. None if all may. Drafts must be allowed."""
        ...

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of these tokens may follow, one after another."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow; empty where there is a choice."""
        ...

    def copy(self) -> Constraint:
        """The same state, for another sample of the prompt."""
        ...


class GrammarConstraint:
    """Implements `Constraint` with a matcher of llguidance."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._forced: list[int] | None = None

    def advance(self, token: int) -> str:
        """See `Constraint`."""
        self._forced = None
        if self._matcher.consume_token(token):
            return ""
        return f"token {token} does not fit the grammar: {self._matcher.get_error() or 'it must not come here'}"

    def rows(self, drafts: Sequence[int]) -> np.ndarray | None:
        """See `Constraint`."""
        matcher, bits = self._matcher, np.empty((1 + len(drafts), self._words), np.int32)
        taken = 0
        for row, token in enumerate([*drafts, None]):
            matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)
            if token is None or not matcher.consume_token(token):
                break
            taken += 1
        if taken:
            matcher.rollback(taken)
        return bits

    def allowed(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        return self._matcher.validate_tokens(list(drafts)) if drafts else 0

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """See `Constraint`."""
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced

    def copy(self) -> GrammarConstraint:
        """See `Constraint`."""
        return GrammarConstraint(self._matcher.deep_copy(), 32 * self._words)
