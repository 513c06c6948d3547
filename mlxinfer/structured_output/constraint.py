"""Constraint of one answer: host-side state of its sequence."""

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

    from .formatting_drafts import FormattingDrafts
    from .number_limits import NumberLimit

CERTAIN = 0.999
"""Probability assigned to a forced token."""
_FORESIGHT = 32
"""Approximate number of tokens predicted ahead."""
_TOO_LONG = "structure: what may follow here takes too long to find out"
_GAVE_UP = re.compile("max is|Too many|lexer error")
"""Matcher errors about the cost of a step, as opposed to a token that is not allowed."""
_UNLIKELY = 0.3
"""Probability below which no further token is guessed."""


class Constraint(Protocol):
    """The engine's interface. A constraint follows the tokens that the host has read, not those that are only on the device."""

    @property
    def fault(self) -> str:
        """Reason why the answer cannot continue, or "". The last rows are then invalid, and so is a token sampled from them."""
        ...

    def advance(self, token: int) -> str:
        """Consume the answer's next token. Returns the reason if it is not allowed, otherwise ""."""
        ...

    def rows(self, drafts: Sequence[int]) -> np.ndarray | None:
        """Return masks of allowed tokens after the answer and after each draft, int32 `[1 + drafts, vocab / 32]`, lowest bit first.

        None if all tokens are allowed. Drafts must be allowed.
        """
        ...

    def allowed(self, drafts: Sequence[int]) -> int:
        """Return the number of leading drafts that are allowed in sequence."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must follow; empty if there is a choice."""
        ...

    def expected(self) -> tuple[list[int], list[float]]:
        """Return likely tokens, those of `forced` first, with the cumulative probability of each."""
        ...

    def copy(self) -> Constraint:
        """Return a copy of the state, for another sample of the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class JSONText:
    """State of a vocabulary for answers in JSON."""

    numbers: NumberLimit
    """Limit on the digits of numbers."""
    formatting: FormattingDrafts
    """Formatting tokens that the model wrote before."""


class GrammarConstraint:
    """Implements `Constraint` with a matcher of llguidance."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, json: JSONText | None = None, ends: Collection[int] = ()) -> None:
        """Create a constraint over `vocab_size` logits.

        `json` is given for answers in JSON. `ends` are the EOS tokens, which the matcher consumes but cannot roll back.
        """
        self._matcher = matcher
        self._ends = ends
        self._words = (vocab_size + 31) // 32
        self._json, self._place = json, BEGINNING
        self._last: int | None = None
        """Last token if it is JSON punctuation, otherwise None."""
        self._after_name = False
        """True if the last token was forced."""
        self._forced: list[int] | None = None
        self._expected: tuple[list[int], list[float]] | None = None
        self._fault = ""

    @property
    def fault(self) -> str:
        """See `Constraint`: the matcher exceeded its cost limit of a step."""
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
            if matcher.is_error():  # the row then allows only the end
                self._fault = f"{_TOO_LONG}: {_reason(matcher)}"
                return bits
            if numbers is not None:
                numbers.apply(place, bits[row])
            if row == fits:  # a matcher is unusable after a token that does not fit
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
        """True if only the end may follow."""
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
                self._extend_expected(tokens, chances, self._json)
            self._expected = tokens, chances
        return self._expected

    def copy(self) -> GrammarConstraint:
        """See `Constraint`."""
        other = GrammarConstraint(self._matcher.deep_copy(), 32 * self._words, self._json, self._ends)
        other._place, other._last, other._after_name, other._fault = self._place, self._last, self._after_name, self._fault
        return other

    def _follow(self, token: int, json: JSONText) -> None:
        """Record the punctuation that follows a name or other punctuation."""
        forced = self._forced is not None and self._forced[:1] == [token]
        if not forced and self._after_name:
            json.formatting.learn(None, token)
        elif not forced and self._last is not None and not in_string(self._place):
            json.formatting.learn(self._last, token)
        self._after_name, self._last = forced, token if json.formatting.joint(token) else None

    def _extend_expected(self, tokens: list[int], chances: list[float], json: JSONText) -> None:
        """Append guessed tokens and the tokens forced after them while they are likely enough."""
        matcher, taken, chance = self._matcher, 0, CERTAIN
        place, last, after_name = self._place, self._last, self._after_name
        while len(tokens) < _FORESIGHT:
            for token in tokens[taken:]:
                matcher.consume_token(token)
                place, after_name = json.numbers.after(place, token), True
            taken = len(tokens)
            if not after_name and (last is None or in_string(place)):
                break
            guess = json.formatting.guess(None if after_name else last, lambda token: matcher.validate_tokens([token]) == 1)
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
