"""Predicts formatting tokens (spaces, quotes, commas) from the tokens that the model wrote in the same place before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..util.dataclass import dataclass

_JOINTS = frozenset(b' \t\n\r":,{}[]')
_KEPT = 3
"""Number of followers stored per token."""
_RIGHT, _SEEN = 4.0, 5.0
"""Initial counts of correct guesses and of guesses."""
_MEMORY = 0.95
"""Decay of the counts per token."""
_NAME = -1


@dataclass(slots=True)
class _Follower:
    """Tokens that followed one token."""

    tokens: tuple[int, ...] = ()
    """Latest first."""
    right: float = _RIGHT
    seen: float = _SEEN


class FormattingDrafts:
    """Last observed successors of names and punctuation, used as drafts: a wrong guess costs only time.

    All answers of a model share one object.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Create an empty table; `pieces` are the bytes of each token."""
        self._pieces = pieces
        self._after: dict[int, _Follower] = {}

    def joint(self, token: int) -> bool:
        """Return True if a token has only JSON punctuation."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        return bool(piece) and _JOINTS.issuperset(piece)

    def learn(self, before: int | None, token: int) -> None:
        """Record that `token` followed `before`; None means a forced name."""
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
        """Return (latest allowed successor of `before`, probability); None if unknown."""
        known = self._after.get(_NAME if before is None else before)
        token = None if known is None else next(filter(allowed, known.tokens), None)
        return None if known is None or token is None else (token, known.right / known.seen)
