"""What a model writes where the grammar leaves it a choice that it hardly ever uses: blanks, quotes and commas between names and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..util.dataclass import dataclass

_JOINTS = frozenset(b' \t\n\r":,{}[]')
_KEPT = 3
"""Tokens that are remembered for what came before."""
_RIGHT, _SEEN = 4.0, 5.0
"""How often a guess holds, until it is known better."""
_MEMORY = 0.95
"""Weight of the past at each new token."""
_NAME = -1


@dataclass(slots=True)
class _Follower:
    """What followed one token."""

    tokens: tuple[int, ...] = ()
    """The latest first."""
    right: float = _RIGHT
    seen: float = _SEEN


class Habits:
    """Which token follows which where nothing but punctuation does, as last seen: guesses for drafts, so a wrong one costs time only.

    Shared by all answers of a model."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces`: the bytes of each token."""
        self._pieces = pieces
        self._after: dict[int, _Follower] = {}

    def joint(self, token: int) -> bool:
        """Whether a token is nothing but punctuation of JSON."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        return bool(piece) and _JOINTS.issuperset(piece)

    def learn(self, before: int | None, token: int) -> None:
        """`token` followed `before`, which is None for a name that was given."""
        key, joint = _NAME if before is None else before, self.joint(token)
        known = self._after.get(key)
        if known is None:
            if joint:
                self._after[key] = _Follower((token,))
            return
        known.right, known.seen = _MEMORY * known.right + (token in known.tokens), _MEMORY * known.seen + 1
        if joint and known.tokens[0] != token:
            known.tokens = (token, *[other for other in known.tokens if other != token])[:_KEPT]

    def guess(self, before: int | None, allowed: Callable[[int], bool]) -> tuple[int, float] | None:
        """What may follow `before` and most lately did, and the chance that it does again."""
        known = self._after.get(_NAME if before is None else before)
        token = None if known is None else next(filter(allowed, known.tokens), None)
        return None if known is None or token is None else (token, known.right / known.seen)
