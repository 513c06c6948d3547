"""Limits on clients' grammars, checked before compilation: those that would exceed llguidance's time or stack."""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import Any

from ..errors import SamplingError
from ..util.dataclass import dataclass
from .reference_chain import longest_chain
from .schema import normalized

_TOKEN = re.compile(
    r"""[ \t]+ | (?:\#|//)[^\n]* | (?P<line>(?:\r?\n)+) | (?P<text>"(?:[^"\\\n]|\\.)*"i?) | (?P<regex>/(?:[^/\\]|\\[^\n])+/[imslux]*)
    | (?P<value>%(?:json|regex|llguidance)) | (?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    | (?:0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?) | <[^<>\s]+> | @[A-Za-z0-9_-]+ | %lark | %[a-z]+
    | (?P<sign>::|->|[:()\[\]{}.,~|&=_+*?@])""",
    re.VERBOSE,
)
"""Tokens of llguidance's reader (`parser/src/lark/lexer.rs`). Both must agree on texts and references. llguidance stops with an error where
no token matches, so the rest need not be read."""
MOST_RULES = 2000
MOST_TOKENS = 60_000
"""Maximum number of tokens, with spaces. A longer grammar has more symbols than llguidance accepts."""
LONGEST_TERMINAL = 20_000
"""Characters of a terminal beyond the grammar's length, with each reference expanded."""
LONGEST_CHAIN = 400
"""Nesting of rules and brackets; each level uses stack."""
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(slots=True)
class _LarkRule:
    size: int = 0
    """Number of characters of texts and expressions."""
    names: list[str] = field(default_factory=list)
    """Referenced names, with repetitions."""
    depth: int = 1
    """Nesting of brackets plus one."""


@dataclass(frozen=True, slots=True)
class LarkText:
    """A grammar's properties known without compilation."""

    rules: dict[str, _LarkRule]
    text: str
    """The grammar with normalized schemas."""
    text_size: int
    """Number of characters of all texts, which bounds the forced part of an answer."""
    tokens: int


class _LarkReader:
    """Reads the tokens of a grammar in one pass."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self.rules: dict[str, _LarkRule] = {"": _LarkRule()}
        self.text_size = 0
        self.tokens = 0
        self._rule, self._depth = self.rules[""], 1
        self._square = 0
        self._text: list[str] = []
        self._written = 0
        self._defined: tuple[str, int] | None = None
        """(last name of this line, number of references before it); a colon would define that name."""
        self._outside: list[tuple[_LarkRule, int]] = []
        """(rule, nesting) around each open brace: of a nested grammar, or of the same rule for plain braces."""

    def read(self) -> None:
        """Read the grammar. Raises `SamplingError`."""
        place, nested, before = 0, False, ""
        while found := _TOKEN.match(self._grammar, place):
            self.tokens += 1
            if self.tokens > MOST_TOKENS:
                raise _grammar_error(f"it has more than {MOST_TOKENS} words and signs: make it shorter")
            place = found.end()
            kind = found.lastgroup
            if kind == "value":
                place = self._value(place, is_schema=found[0] == "%json")
            elif kind == "name" and before not in ("::", "%if"):  # a function of a rule's parameter follows these
                self._refer(found[0].lstrip("?!"))
            elif kind == "sign":
                self._sign(found[0], nested)
            elif kind == "line":
                self._defined = None
            elif kind in ("text", "regex"):
                self._rule.size += len(found[0])
                self.text_size += len(found[0])
            before = before if kind is None and found[0][0] in " \t#/" else found[0]
            nested = found[0] == "%lark" or (nested and kind in (None, "line"))

    def _value(self, place: int, *, is_schema: bool) -> int:
        """Return the end of the JSON value at `place`.

        Raises `SamplingError`, also for a value that only some JSON readers accept.
        """
        start = _SPACE.match(self._grammar, place)
        assert start is not None
        try:
            value: Any
            value, end = _DECODER.raw_decode(self._grammar, start.end())
            made = normalized(value) if is_schema else value
        except ValueError as error:
            raise _grammar_error(f"a value in it is not JSON: {error}") from None
        except RecursionError:
            raise _grammar_error("a schema in it is nested too deeply") from None
        if made != value:
            options = {key: value[key] for key in ("x-guidance",) if isinstance(value, dict) and key in value}
            self._text += [self._grammar[self._written : start.end()], json.dumps({**made, **options})]
            self._written = end
        return end

    @property
    def text(self) -> str:
        """The grammar with normalized schemas."""
        return "".join([*self._text, self._grammar[self._written :]])

    def _refer(self, name: str) -> None:
        if not self._square:  # names in square brackets are attributes of a rule
            self._defined = name, len(self._rule.names)
        self._rule.names.append(name)

    def _sign(self, sign: str, nested: bool) -> None:
        if sign == ":" and self._defined is not None and not self._square:
            name, before = self._defined
            del self._rule.names[before:]
            self._rule, self._depth, self._defined = self.rules.setdefault(name, _LarkRule()), 1, None
        elif sign in "()":
            self._deeper(1 if sign == "(" else -1)
        elif sign in "[]":
            self._square = max(0, self._square + (1 if sign == "[" else -1))
        elif sign == "{":
            self._outside.append((self._rule, self._depth))
            self._deeper(1)
            if nested:
                self._rule.names.append("start")
        elif sign == "}" and self._outside:
            self._rule, self._depth = self._outside.pop()

    def _deeper(self, levels: int) -> None:
        self._depth += levels
        self._rule.depth = max(self._rule.depth, self._depth)


def read_lark(grammar: str) -> LarkText:
    """Read a grammar, valid or not, in linear time. Raises `SamplingError` for an unsupported schema in it."""
    reader = _LarkReader(grammar)
    reader.read()
    return LarkText(reader.rules, reader.text, reader.text_size, reader.tokens)


def check_count(rules: int) -> None:
    """Raise `SamplingError` if a grammar has too many rules."""
    if rules > MOST_RULES:
        raise _grammar_error(f"it has {rules} rules, and {MOST_RULES} are allowed")


def check_lark(grammar: str) -> LarkText:
    """Read a grammar and raise `SamplingError` for too many rules, or naming a rule that is too deep or too long."""
    lark = read_lark(grammar)
    check_count(len(lark.rules) - 1)
    references = {name: rule.names for name, rule in lark.rules.items()}
    levels, first = longest_chain(references, {name: rule.depth for name, rule in lark.rules.items()})
    if levels > LONGEST_CHAIN:
        raise _grammar_error(f"rule {first!r} leads {levels} rules and brackets deep, and {LONGEST_CHAIN} are allowed")
    most = LONGEST_TERMINAL + len(grammar)
    sizes: dict[str, int] = {}
    for name in lark.rules:
        if name.isupper() and _written_out(name, lark.rules, sizes, most) > most:
            raise _grammar_error(f"terminal {name!r} is longer than {most} characters with what it refers to written out")
    return lark


def _written_out(name: str, rules: dict[str, _LarkRule], sizes: dict[str, int], most: int) -> int:
    """Return the characters of a terminal with each reference expanded, or a number above `most`. `LONGEST_CHAIN` bounds the recursion."""
    if name not in sizes:
        sizes[name] = 0  # a self-reference is refused later
        rule = rules[name]
        total = rule.size
        for other in rule.names:
            total += _written_out(other, rules, sizes, most) if other in rules else 0
            if total > most:
                break
        sizes[name] = total
    return sizes[name]


def _grammar_error(what: str) -> SamplingError:
    return SamplingError(f"structure: grammar: {what}")
