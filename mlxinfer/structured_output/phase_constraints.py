"""Constraints with several phases: reasoning before a constrained answer, free text before calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from .constraint import CERTAIN, Constraint, GrammarConstraint
from .tool_grammar import CallGrammar
from .vocabulary import GrammarVocabulary, is_cut, overlap

_MOST_TO_COMPLETE = 3
"""Tokens by which a reasoning budget may be exceeded to complete a UTF-8 character."""


class Phased(ABC):
    """A constraint that computes the row of its present state only; drafts are tried on a copy."""

    _draft_fault = ""
    """Fault that occurred after a draft."""

    @property
    def fault(self) -> str:
        """See `Constraint`."""
        held = self._held()
        return self._draft_fault or ("" if held is None else held.fault)

    @abstractmethod
    def _held(self) -> Constraint | None:
        """Return the constraint of the present phase; None if the text is free."""

    @abstractmethod
    def advance(self, token: int) -> str:
        """See `Constraint`."""

    @abstractmethod
    def row(self) -> np.ndarray | None:
        """Return bits of the tokens allowed now, int32 `[vocab / 32]`; None if all are."""

    @abstractmethod
    def forced(self) -> list[int]:
        """See `Constraint`."""

    @abstractmethod
    def copy(self) -> Phased:
        """See `Constraint`."""

    def expected(self) -> tuple[list[int], list[float]]:
        """Return the tokens of `forced` and their probabilities."""
        forced = self.forced()
        return forced, [CERTAIN] * len(forced)

    def rows(self, drafts: Sequence[int], words: np.ndarray) -> np.ndarray | None:
        """See `Constraint`. `words` is the row that allows all tokens."""
        state, found = self, [self.row()]
        for number, token in enumerate(drafts):
            state = state.copy() if number == 0 else state
            if state.advance(token):
                found += [None] * (len(drafts) - number)  # unreachable, as drafts are allowed
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
    """Return True if a row allows a token."""
    return bool(int(row[token // 32]) >> (token % 32) & 1)


class CallsInText(Phased):
    """Free text until a call starts; the call is constrained by the offered tools. Text that only starts like a call stays free."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: CallGrammar, *, parallel: bool) -> None:
        """Create a constraint; with `parallel`, further text and calls may follow the first call."""
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._parallel = parallel
        self._longest = max(map(len, grammar.triggers))
        self._call: GrammarConstraint | None = None
        self._over = False
        """True after the only allowed call."""
        self._watches = True
        self._text = b""
        """Last bytes of the text in which a call may have started."""
        self._tokens: list[int] = []
        """Tokens of `_text`."""

    def advance(self, token: int) -> str:
        if self._over:
            return f"token {token} comes after the only call"
        if self._call is None:
            if self._watches:
                self._watch(token)
            return ""
        why = self._call.advance(token)
        if not why and self._call.stopped:
            self._call, self._over = None, not self._parallel
        return why

    def _held(self) -> Constraint | None:
        return self._call

    def row(self) -> np.ndarray | None:
        if self._over:
            return self._vocabulary.ends
        if self._call is None:
            return None
        rows = self._call.rows([])
        return None if rows is None else np.asarray(rows[0])

    def rows(self, drafts: Sequence[int], words: np.ndarray | None = None) -> np.ndarray | None:
        free = self._call is None and not self._over
        return None if free and not (drafts and self._watches) else super().rows(drafts, self._vocabulary.all)

    def allowed(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        free = self._call is None and not self._over
        return len(drafts) if not drafts or (free and not self._watches) else self.allowed_of(drafts)

    def forced(self) -> list[int]:
        """See `Constraint`."""
        return [] if self._call is None else self._call.forced()

    def copy(self) -> CallsInText:
        made = CallsInText(self._vocabulary, self._grammar, parallel=self._parallel)
        made._call = None if self._call is None else self._call.copy()
        made._over, made._watches, made._text, made._tokens = self._over, self._watches, self._text, list(self._tokens)
        return made

    def _watch(self, token: int) -> None:
        """Search for the start of a call in the text with one more token."""
        piece, triggers = self._vocabulary.bytes_of(token), self._grammar.triggers
        if not self._text and not self._grammar.at_start and not any(trigger[:1] in piece for trigger in triggers):
            return
        self._text += piece
        self._tokens.append(token)
        if self._grammar.at_start:
            begun = self._text.lstrip()
            if any(begun.startswith(trigger) for trigger in triggers):
                self._begin(self._tokens)
            else:
                self._watches = any(trigger.startswith(begun) for trigger in triggers)
            return
        places = [place for trigger in triggers if (place := self._text.find(trigger)) >= 0]
        if places:
            self._begin(self._from(min(places)))
            return
        keep = max((overlap(self._text, trigger) for trigger in triggers), default=0)
        self._tokens = self._from(len(self._text) - keep) if keep else []
        self._text = b"".join(map(self._vocabulary.bytes_of, self._tokens))

    def _from(self, place: int) -> list[int]:
        """Return the tokens from the one that contains byte `place` of the text."""
        end = 0
        for number, token in enumerate(self._tokens):
            end += len(self._vocabulary.bytes_of(token))
            if end > place:
                return self._tokens[number:]
        return []

    def _begin(self, tokens: list[int]) -> None:
        call = self._grammar.constraint.copy()
        fits = not any(call.advance(token) for token in tokens)
        self._call = call if fits else None
        self._text, self._tokens = b"", []
        self._watches = not self._grammar.at_start
        if fits and call.stopped:
            self._call, self._over = None, not self._parallel


class Reasoning(Phased):
    """Reasoning within a token budget, followed by an answer with its own constraint or a free one."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        begin: str,
        end: str,
        after: Constraint | None,
        *,
        first: Constraint | None,
        budget: int | None,
        begun: bool,
        spaced: bool = True,
    ) -> None:
        """Create a constraint for reasoning between the literals `begin` and `end`.

        With `begun`, the prompt has opened the reasoning; otherwise the model may. `after` constrains the answer, `first` an answer without
        reasoning. With `spaced`, line breaks may precede a constrained answer. Raises `SamplingError` if the model's tokens cannot write
        `end` and there is a `budget`.
        """
        self._vocabulary = vocabulary
        self._begin, self._end = begin.strip().encode(), end.strip().encode()
        self._begin_tokens = [] if begun else vocabulary.tokens_of(begin.strip())
        self._after = after if begun else first
        self._fresh = None if after is None or begun else after.copy()
        """Unused copy of `after`, for an answer after reasoning."""
        self._answers = True
        """True if the tokens before the reasoning may also belong to the answer."""
        self._budget = budget
        self._holds = after is not None and not isinstance(after, CallsInText)
        self._spaced = self._holds and spaced
        self._state = "thinking" if begun else "before"
        self._text = b""
        """Text before the reasoning; inside the reasoning, its last bytes."""
        self._count = 0
        """Number of tokens before the reasoning; inside the reasoning, of its tokens."""
        self._closing: list[int] = []
        self._gap = False
        """True if whitespace may precede the constrained answer."""
        if budget is not None:
            vocabulary.spelled(end.strip())
            self._close_if_due()

    def advance(self, token: int) -> str:
        if self._state == "before":
            return self._advance_before(token)
        if self._state == "thinking":
            return self._advance_thinking(token)
        if self._state == "closing":
            if token != self._closing[0]:
                return f"token {token} comes where the reasoning has to end"
            self._closing = self._closing[1:]
            if not self._closing:
                self._state, self._gap = "after", self._spaced
            return ""
        gap, self._gap = self._gap, False
        if self._after is None or (gap and not self._after.allowed([token]) and has(self._vocabulary.spaces, token)):
            return ""
        return self._after.advance(token)

    def _held(self) -> Constraint | None:
        return self._after

    def row(self) -> np.ndarray | None:
        if self._state == "closing":
            return self._vocabulary.row(self._closing[:1])
        if self._state == "thinking":
            return self._thinking_row()
        thinks = self._vocabulary.row(self._begin_tokens[self._count : self._count + 1])
        if self._state == "before" and not self._answers:
            return thinks
        rows = None if self._after is None else self._after.rows([])
        if rows is None:
            return None
        others = thinks if self._state == "before" else self._vocabulary.spaces if self._gap else np.zeros_like(thinks)
        allowed: np.ndarray = np.bitwise_or(rows[0], others)
        return allowed

    def rows(self, drafts: Sequence[int], words: np.ndarray | None = None) -> np.ndarray | None:
        if self._state == "after" and not self._gap:
            return None if self._after is None else self._after.rows(drafts)
        return super().rows(drafts, self._vocabulary.all)

    def allowed(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        if self._state == "after" and not self._gap:
            return len(drafts) if self._after is None else self._after.allowed(drafts)
        return self.allowed_of(drafts)

    def forced(self) -> list[int]:
        """See `Constraint`."""
        if self._state == "closing":
            return self._closing
        return self._after.forced() if self._state == "after" and self._after is not None and not self._gap else []

    def copy(self) -> Reasoning:
        made = object.__new__(Reasoning)
        made.__dict__.update(self.__dict__)
        made._after = None if self._after is None else self._after.copy()
        return made  # `_fresh` is copied before it is advanced

    def _advance_before(self, token: int) -> str:
        """Advance where the model either starts to reason now or never."""
        if self._holds:
            return self._advance_held(token)
        self._text += self._vocabulary.bytes_of(token)
        written = self._text.lstrip()
        if written.startswith(self._begin):
            self._think(written[len(self._begin) :])
            return ""
        if not self._begin.startswith(written):
            self._state = "after"
        return "" if self._after is None else self._after.advance(token)

    def _advance_held(self, token: int) -> str:
        """Advance where either the tokens of `begin` or a constrained answer must follow."""
        assert self._after is not None
        answers = self._answers and bool(self._after.allowed([token]))
        if self._count == len(self._begin_tokens) or token != self._begin_tokens[self._count]:
            self._state = "after"
            return self._after.advance(token) if self._answers else f"token {token} comes inside {self._begin!r}"
        self._count += 1
        if self._count == len(self._begin_tokens):
            self._think(b"")
        elif answers:
            self._after.advance(token)
        self._answers = answers
        return ""

    def _think(self, text: bytes) -> None:
        """Start the reasoning with this text."""
        self._state, self._text, self._count = "thinking", text, 0
        self._after = None if self._fresh is None else self._fresh.copy()
        self._close_if_due()

    def _advance_thinking(self, token: int) -> str:
        self._text += self._vocabulary.bytes_of(token)
        self._count += 1
        place = self._text.find(self._end)
        if place < 0:
            self._text = self._text[-len(self._end) - 3 :]
            self._close_if_due()
            return ""
        rest = self._text[place + len(self._end) :]
        self._state, self._text = "after", b""
        self._gap = self._spaced and not rest
        if rest.strip() and self._after is not None and not self._holds:
            return self._after.advance(token)
        return ""

    def _close_if_due(self) -> None:
        """Force the end of the reasoning once the budget is spent, after a complete character."""
        if self._state != "thinking" or self._budget is None or self._count < self._budget:
            return
        if is_cut(self._text) and self._budget and self._count < self._budget + _MOST_TO_COMPLETE:
            return
        missing = self._end[overlap(self._text, self._end) :]
        self._state, self._closing = "closing", self._vocabulary.spelled(missing.decode("utf-8", "replace"))

    def _thinking_row(self) -> np.ndarray | None:
        """Ban ends, and tokens that end the reasoning and start the answer, if the answer is constrained."""
        if not self._holds:
            return None
        banned = self._vocabulary.ends
        if begun := overlap(self._text, self._end):
            banned = np.bitwise_or(banned, self._vocabulary.running_on(self._end, begun))
        allowed: np.ndarray = np.bitwise_not(banned)
        return allowed


class Preamble(Phased):
    """A fixed text, such as a channel's header, before a constrained answer."""

    def __init__(self, vocabulary: GrammarVocabulary, tokens: list[int], after: Constraint) -> None:
        """Create a constraint that forces `tokens` and continues with `after`."""
        self._vocabulary = vocabulary
        self._left = tokens
        self._after = after

    def advance(self, token: int) -> str:
        if not self._left:
            return self._after.advance(token)
        if token != self._left[0]:
            return f"token {token} comes inside what the answer begins with"
        self._left = self._left[1:]
        return ""

    def _held(self) -> Constraint | None:
        return self._after

    def row(self) -> np.ndarray | None:
        if self._left:
            return self._vocabulary.row(self._left[:1])
        rows = self._after.rows([])
        return None if rows is None else np.asarray(rows[0])

    def rows(self, drafts: Sequence[int], words: np.ndarray | None = None) -> np.ndarray | None:
        return super().rows(drafts, self._vocabulary.all) if self._left else self._after.rows(drafts)

    def allowed(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        return self.allowed_of(drafts) if self._left else self._after.allowed(drafts)

    def forced(self) -> list[int]:
        """See `Constraint`."""
        return self._left or self._after.forced()

    def expected(self) -> tuple[list[int], list[float]]:
        return super().expected() if self._left else self._after.expected()

    def copy(self) -> Preamble:
        return Preamble(self._vocabulary, self._left, self._after.copy())
