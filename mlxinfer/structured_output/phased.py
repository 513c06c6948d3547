"""What constraints of several phases have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from .constraint import CERTAIN, Constraint


class Phased(ABC):
    """A constraint that knows the row of its present state only: drafts are tried on a copy."""

    _draft_fault = ""
    """What went wrong after a draft."""

    @property
    def fault(self) -> str:
        """See `Constraint`."""
        held = self._held()
        return self._draft_fault or ("" if held is None else held.fault)

    @abstractmethod
    def _held(self) -> Constraint | None:
        """What the answer is held to at present."""

    @abstractmethod
    def advance(self, token: int) -> str:
        """See `Constraint`."""

    @abstractmethod
    def row(self) -> np.ndarray | None:
        """Bits of the tokens that may come now, int32 `[vocab / 32]`; None if all may."""

    @abstractmethod
    def forced(self) -> list[int]:
        """See `Constraint`."""

    @abstractmethod
    def copy(self) -> Phased:
        """See `Constraint`."""

    def expected(self) -> tuple[list[int], list[float]]:
        """The tokens of `forced`, and the chance of each."""
        forced = self.forced()
        return forced, [CERTAIN] * len(forced)

    def rows(self, drafts: Sequence[int], words: np.ndarray) -> np.ndarray | None:
        """See `Constraint`. `words`: the row where all may come."""
        state, found = self, [self.row()]
        for number, token in enumerate(drafts):
            state = state.copy() if number == 0 else state
            if state.advance(token):
                found += [None] * (len(drafts) - number)  # not reached: drafts are allowed
                break
            found.append(state.row())
        self._draft_fault = state.fault
        if all(each is None for each in found):
            return None
        return np.stack([words if each is None else each for each in found])

    def allowed_of(self, drafts: Sequence[int]) -> int:
        """See `Constraint.allowed`."""
        state = self.copy()
        for number, token in enumerate(drafts):
            row = state.row()
            if (row is not None and not has(row, token)) or state.advance(token):
                return number
        return len(drafts)


def has(row: np.ndarray, token: int) -> bool:
    """Whether a token is among those of a row."""
    return bool(int(row[token // 32]) >> (token % 32) & 1)
