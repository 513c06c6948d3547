"""What one answer may still say: a value on its sequence, on the host only."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import one_line
from ..util.dataclass import dataclass
from .number_limits import BEGINNING, in_string

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .formatting_drafts import Habits
    from .number_limits import NumberLimit

CERTAIN = 0.999
"""The chance that a token comes about which a structure leaves no choice."""
_FORESIGHT = 32
"""Tokens that are looked ahead, about."""
_TOO_LONG = "structure: what may follow here takes too long to find out"
_GAVE_UP = re.compile("max is|Too many|lexer error")
"""What the matcher says when a step costs more than it may, rather than of a token that must not come."""
_UNLIKELY = 0.3
"""A chance below which nothing more is guessed."""


class Constraint(Protocol):
    """The engine's view. It follows the tokens that the host has read, and is never told of those that are on the device only."""

    @property
    def fault(self) -> str:
        """Why the answer cannot go on, or nothing. The last rows mean nothing then, and what is sampled from them does not belong to it."""
        ...

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

    def expected(self) -> tuple[list[int], list[float]]:
        """The tokens that are likely to follow, those of `forced` first, and the chance of each that all up to it do."""
        ...

    def copy(self) -> Constraint:
        """The same state, for another sample of the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class JSONText:
    """What answers in JSON need to know of a vocabulary."""

    numbers: NumberLimit
    """How long its numbers may get."""
    habits: Habits
    """How the model puts it."""


class GrammarConstraint:
    """Implements `Constraint` with a matcher of llguidance."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, json: JSONText | None = None, ends: Collection[int] = ()) -> None:
        """`vocab_size`: logits of the model. `json`: what is known of the vocabulary where the answer is JSON. `ends`: the tokens that end
        an answer, which a matcher takes but cannot take back."""
        self._matcher = matcher
        self._ends = ends
        self._words = (vocab_size + 31) // 32
        self._json, self._place = json, BEGINNING
        self._last: int | None = None
        """The last token, if it is punctuation."""
        self._after_name = False
        """Whether the last token was forced."""
        self._forced: list[int] | None = None
        self._expected: tuple[list[int], list[float]] | None = None
        self._fault = ""

    @property
    def fault(self) -> str:
        """See `Constraint`: the matcher ran out of what one step may cost."""
        return self._fault

    def advance(self, token: int) -> str:
        """See `Constraint`."""
        if not self._matcher.consume_token(token):
            reason = _reason(self._matcher)
            if _GAVE_UP.search(reason):
                return f"{_TOO_LONG}: {reason}"
            return f"token {token} does not fit the grammar: {reason or 'it must not come here'}"
        if self._json is not None:
            self._follow(token, self._json)
            self._place = self._json.numbers.after(self._place, token)
        self._forced = self._forced[1:] or None if self._forced and self._forced[0] == token else None
        self._expected = None
        return ""

    def rows(self, drafts: Sequence[int]) -> np.ndarray | None:
        """See `Constraint`."""
        matcher, bits, place = self._matcher, np.empty((1 + len(drafts), self._words), np.int32), self._place
        numbers, nbytes = None if self._json is None else self._json.numbers, 4 * self._words
        taken, address, fits = 0, bits.ctypes.data, self.allowed(drafts)
        for row in range(len(bits)):
            matcher.unsafe_compute_mask_ptr(address + row * nbytes, nbytes)
            if matcher.is_error():  # then that row says that the answer may end
                self._fault = f"{_TOO_LONG}: {_reason(matcher)}"
                return bits
            if numbers is not None:
                numbers.apply(place, bits[row])
            if row == fits:  # a matcher that was given what does not fit is of no use any more
                bits[row + 1 :] = -1
                break
            matcher.consume_token(drafts[row])
            taken += 1
            if numbers is not None:
                place = numbers.after(place, drafts[row])
        if taken:
            matcher.rollback(taken)
        return bits

    def allowed(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        going_on = next((i for i, token in enumerate(drafts) if token in self._ends), len(drafts))
        count = self._matcher.validate_tokens(list(drafts[:going_on])) if going_on else 0
        if self._json is None:
            return count
        place, numbers = self._place, self._json.numbers
        for i, token in enumerate(drafts[:count]):
            if not numbers.allows(place, token):
                return i
            place = numbers.after(place, token)
        return count

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """See `Constraint`."""
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced

    def expected(self) -> tuple[list[int], list[float]]:
        """See `Constraint`."""
        if self._expected is None:
            forced = self.forced()
            tokens, chances = list(forced), [CERTAIN] * len(forced)
            if self._json is not None and (forced or self._after_name or self._last is not None):
                self._go_on(tokens, chances, self._json)
            self._expected = tokens, chances
        return self._expected

    def copy(self) -> GrammarConstraint:
        """See `Constraint`."""
        other = GrammarConstraint(self._matcher.deep_copy(), 32 * self._words, self._json, self._ends)
        other._place, other._last, other._after_name, other._fault = self._place, self._last, self._after_name, self._fault
        return other

    def _follow(self, token: int, json: JSONText) -> None:
        """Learn which punctuation follows a name, or other punctuation."""
        forced = self._forced is not None and self._forced[:1] == [token]
        if not forced and self._after_name:
            json.habits.learn(None, token)
        elif not forced and self._last is not None and not in_string(self._place):
            json.habits.learn(self._last, token)
        self._after_name, self._last = forced, token if json.habits.joint(token) else None

    def _go_on(self, tokens: list[int], chances: list[float], json: JSONText) -> None:
        """Guess what follows, add what is forced after it, and guess again, as long as that is worth it."""
        matcher, taken, chance = self._matcher, 0, CERTAIN
        place, last, after_name = self._place, self._last, self._after_name
        while len(tokens) < _FORESIGHT:
            for token in tokens[taken:]:
                matcher.consume_token(token)
                place, after_name = json.numbers.after(place, token), True
            taken = len(tokens)
            if not after_name and (last is None or in_string(place)):
                break
            guess = json.habits.guess(None if after_name else last, lambda token: matcher.validate_tokens([token]) == 1)
            if guess is None or chance * guess[1] < _UNLIKELY:
                break
            last, chance, after_name = guess[0], chance * guess[1], False
            matcher.consume_token(last)
            place, taken = json.numbers.after(place, last), taken + 1
            further = matcher.compute_ff_tokens()
            tokens += [last, *further]
            chances += [chance] * (1 + len(further))
        if taken:
            matcher.rollback(taken)


def _reason(matcher: LLMatcher) -> str:
    return one_line(matcher.get_error().partition("\n<")[0])
