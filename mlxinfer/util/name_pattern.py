"""Matcher of regular expressions from untrusted files, with a budget of steps.

Python's `re` backtracks, which may take exponential time. This matcher tracks all possible end positions of a part together, as the bits
of a number (Thompson, "Regular Expression Search Algorithm", 1968).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
MOST_STEPS = 2_000_000
"""Maximum steps of all matches with the expressions of one file: about two seconds."""
LONGEST = 1000
"""Maximum characters of an expression."""
_PLAIN = re.compile(r"[\w.\-]+")
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COUNT = re.compile(r"\{([0-9]{0,9})(,?)([0-9]{0,9})\}")
_Test = Callable[[str], bool]
_CLASSES: dict[str, _Test] = {
    "d": str.isdecimal,
    "D": lambda character: not character.isdecimal(),
    "w": lambda character: character.isalnum() or character == "_",
    "W": lambda character: not (character.isalnum() or character == "_"),
    "s": str.isspace,
    "S": lambda character: not character.isspace(),
}


class PatternError(ValueError):
    """The expression is not supported or takes too many steps. The message is the end of a sentence."""


class Steps:
    """Budget of steps for all matches with the expressions of one file."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.taken = 0
        """Number of steps so far."""
        self._most = most

    def take(self, count: int = 1) -> None:
        """Count steps. Raises `PatternError` beyond the budget."""
        self.taken += count
        if self.taken > self._most:
            raise PatternError(f"takes more than {self._most} steps to match")


class NamePattern:
    """An expression in a subset of Python's syntax, without back-references and flags."""

    def __init__(self, text: str, steps: Steps) -> None:
        """Parse an expression. Raises `PatternError`."""
        if len(text) > LONGEST:
            raise PatternError(f"has {len(text)} characters, and {LONGEST} are allowed")
        self._node = _Parser(text).parsed()
        self._steps = steps

    def matches(self, name: str, *, whole: bool) -> bool:
        """Return True if the expression matches a prefix of the name, or with `whole` all of it.

        Raises `PatternError` after too many steps.
        """
        if len(name) > LONGEST:
            raise PatternError(f"cannot be matched with a name of {len(name)} characters")
        ends = self._node(_Match(name, self._steps), 1)
        return bool(ends >> len(name)) if whole else bool(ends)


class _Match:
    """A match in progress. Positions in the name are bits; bit 0 is before the first character."""

    def __init__(self, name: str, steps: Steps) -> None:
        self.name = name
        self.take = steps.take
        self.end = 1 << len(name)
        self._where: dict[_Test, int] = {}

    def where(self, fits: _Test, cost: int) -> int:
        """Return the positions before the characters that fit; each character costs `cost` steps."""
        if fits not in self._where:
            self.take(cost * len(self.name))
            self._where[fits] = sum(1 << place for place, character in enumerate(self.name) if fits(character))
        return self._where[fits]


_Node = Callable[[_Match, int], int]
"""Maps the possible start positions of a part of an expression to its possible end positions."""


def _one(fits: _Test, cost: int = 1) -> _Node:
    def after(match: _Match, places: int) -> int:
        match.take()
        return (places & match.where(fits, cost)) << 1

    return after


def _in_turn(parts: list[_Node]) -> _Node:
    def after(match: _Match, places: int) -> int:
        for part in parts:
            if not places:
                break
            places = part(match, places)
        return places

    return parts[0] if len(parts) == 1 else after


def _any_of(parts: list[_Node]) -> _Node:
    def after(match: _Match, places: int) -> int:
        found = 0
        for part in parts:
            found |= part(match, places)
        return found

    return parts[0] if len(parts) == 1 else after


def _repeated(part: _Node, least: int, most: int | None) -> _Node:
    def after(match: _Match, places: int) -> int:
        longest = len(match.name) + 1  # more repetitions change nothing
        for _ in range(min(least, longest)):
            match.take()
            places = part(match, places)
        found = new = places
        for _ in range(longest if most is None else min(most - least, longest)):
            match.take()
            if not new:
                break
            new = part(match, new) & ~found
            found |= new
        return found

    return after


def _anything(match: _Match, places: int) -> int:
    """Match `.*` directly: all positions from the first one."""
    match.take()
    return (match.end << 1) - (places & -places) if places else 0


def _at_start(match: _Match, places: int) -> int:
    match.take()
    return places & 1


def _at_end(match: _Match, places: int) -> int:
    match.take()
    return places & match.end


def _ahead(part: _Node, *, wanted: bool) -> _Node:
    def after(match: _Match, places: int) -> int:
        found, rest = 0, places
        while rest:
            place = rest & -rest
            rest ^= place
            match.take()
            if bool(part(match, place)) == wanted:
                found |= place
        return found

    return after


def _any_character(character: str) -> bool:
    return character != "\n"


class _Parser:
    """Parses an expression. Raises `PatternError`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parsed(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("is no regular expression: a bracket is closed that was not opened")
        return node

    def _alternatives(self) -> _Node:
        parts = [self._sequence()]
        while self._took("|"):
            parts.append(self._sequence())
        return _any_of(parts)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeats(self._atom()))
        return _in_turn(parts)

    def _repeats(self, part: _Node) -> _Node:
        counts = self._counts()
        if counts is None:
            return part
        least, most = counts
        if most is not None and most < least:
            raise PatternError("is no regular expression: a count has its larger number first")
        self._took("?")  # laziness does not change the result
        if self._counts() is not None:
            raise PatternError("is no regular expression: a repeat is repeated")
        return _anything if part is _ANY and counts == (0, None) else _repeated(part, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        """Read the minimum and maximum repetitions of the part before; None without a count."""
        sign = self._text[self._at : self._at + 1]
        found = _COUNT.match(self._text, self._at)
        if sign and sign in _REPEATS:
            self._at += 1
            return _REPEATS[sign]
        if found is None or not (found[1] or found[3]):
            return None
        self._at = found.end()
        least = int(found[1] or 0)
        return least, int(found[3]) if found[3] else None if found[2] else least

    def _atom(self) -> _Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            tests, negated = self._set()
            return _one(lambda character: any(test(character) for test in tests) != negated, 1 + len(tests))
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise PatternError(f"is no regular expression: {character} repeats nothing")
        if character in "^$":
            return _at_start if character == "^" else _at_end
        return _ANY if character == "." else _one(character.__eq__)

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > 50:
            raise PatternError("has more than 50 brackets inside one another")
        wanted = None
        if self._took("?"):
            kind = self._next()
            if kind == "P" and self._took("<"):
                while self._next() != ">":
                    pass
            elif kind in "=!":
                wanted = kind == "="
            elif kind != ":":
                raise PatternError(f"has a group that is not understood: (?{kind}")
        node = self._alternatives()
        if not self._took(")"):
            raise PatternError("is no regular expression: a bracket is not closed")
        self._depth -= 1
        return node if wanted is None else _ahead(node, wanted=wanted)

    def _escape(self) -> _Node:
        character = self._next()
        if character in "AZ":
            return _at_start if character == "A" else _at_end
        return _one(self._escaped(character))

    def _escaped(self, character: str) -> _Test:
        if character in _CLASSES:
            return _CLASSES[character]
        if character.isalnum():
            raise PatternError(f"has an escape that is not understood: \\{character}")
        return character.__eq__

    def _set(self) -> tuple[list[_Test], bool]:
        negated, first = self._took("^"), True
        tests: list[_Test] = []
        while first or not self._took("]"):
            first = False
            low = self._next()
            test = self._escaped(self._next()) if low == "\\" else low.__eq__
            if low != "\\" and self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "\\"):
                self._at += 1
                test = _between(low, self._next())
            tests.append(test)
        return tests, negated

    def _took(self, character: str) -> bool:
        found = self._text[self._at : self._at + 1] == character
        self._at += found
        return found

    def _next(self) -> str:
        if self._at == len(self._text):
            raise PatternError("is no regular expression: it ends too early")
        self._at += 1
        return self._text[self._at - 1]


_ANY = _one(_any_character)


def _between(low: str, high: str) -> _Test:
    return lambda character: low <= character <= high


class Endings(Generic[Value]):
    """Values by patterns of name endings, with PEFT's lookup: the first match counts."""

    def __init__(self, patterns: Mapping[str, Value], steps: Steps) -> None:
        """Parse the patterns. Raises `PatternError`."""
        self._values = list(patterns.items())
        self._plain: dict[str, int] = {}
        self._others: list[tuple[int, NamePattern]] = []
        for number, pattern in enumerate(patterns):
            if _PLAIN.fullmatch(pattern.removeprefix("^")):
                self._plain[pattern] = number
            else:
                try:
                    self._others.append((number, NamePattern(rf"(.*\.)?({pattern})", steps)))
                except PatternError as error:
                    raise PatternError(f"the pattern {pattern:.60} {error}") from None

    def value(self, name: str, otherwise: Value) -> Value:
        """Return the value for a name, or `otherwise`. Raises `PatternError` after too many steps."""
        ends = [name, *(name[place + 1 :] for place, character in enumerate(name) if character == ".")]
        first = min((self._plain[end] for end in (f"^{name}", *ends) if end in self._plain), default=len(self._values))
        for number, pattern in self._others:
            if number > first:
                break
            try:
                if pattern.matches(name, whole=True):
                    first = number
            except PatternError as error:
                raise PatternError(f"the pattern {self._values[number][0]:.60} {error}") from None
        return self._values[first][1] if first < len(self._values) else otherwise


def is_ending(name: str, endings: Any) -> bool:
    """Return True if `name` ends with one of a list of names, or if `endings` is not a list."""
    if not isinstance(endings, list):
        return True
    return any(name == ending or name.endswith(f".{ending}") for ending in endings if isinstance(ending, str))
