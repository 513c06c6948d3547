"""Translates GBNF, the grammars of llama.cpp's clients, to Lark text for llguidance, in one pass over its tokens.

`llguidance.gbnf_to_lark` (1.8) translates 7 of the 10 grammars of tests/structured_output. It misreads `\\u00e9` and rejects `\\-` in a
set, and its `.` does not match a newline. It rejects rules named `start`, and `a-b` next to `a_b`. It accepts `[]` and `\\uD800`.
Some of its errors name no line. It takes some 100 times as long for a chain of 1,900 rules, and 5,000 brackets raise RecursionError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import field

from ..errors import SamplingError
from ..util.dataclass import dataclass
from .lark_limits import check_count

_TOKEN = re.compile(
    r"""[ \t]+ | \#[^\r\n]* | (?P<line>\r?\n|\r) | (?P<name>[A-Za-z0-9_-]+) | (?P<is>::=)
    | (?P<text>"(?:[^"\\\r\n]|\\.)*") | (?P<set>\[(?:[^\]\\\r\n]|\\.)*\]) | (?P<sign>[|()*+?.])
    | \{[ \t]*(?P<least>[0-9]{1,9})[ \t]*(?P<comma>,?)[ \t]*(?P<most>[0-9]{0,9})[ \t]*\}""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|[^\\]", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_LITERALLY = frozenset('"\\[]^-/')
_LONGEST_TERMINAL = 20_000
"""Characters of a terminal, including the rules that it refers to. A longer rule stays a rule, whose texts are separate words."""


@dataclass(slots=True)
class _Rule:
    """A rule during parsing."""

    parts: list[str] = field(default_factory=list)
    """Tokens of Lark; those at the places in `names` are names of rules."""
    names: dict[int, tuple[str, int]] = field(default_factory=dict)
    """`(name, line)` by place in `parts`."""

    def add(self, part: str) -> None:
        self.parts.append(part)


def gbnf_to_lark(grammar: str) -> str:
    """Lark text of the same language. Rules that do not refer to themselves become terminals: tokens of a model may span them.

    Raises `SamplingError` with the line or the rule at fault, or for too many rules.
    """
    rules = _read(grammar)
    check_count(len(rules))
    if "root" not in rules:
        raise _error("rule 'root' is missing")
    for name, rule in rules.items():
        missing = next(((other, line) for other, line in rule.names.values() if other not in rules), None)
        if missing is not None:
            raise _error(f"rule {name!r} refers to {missing[0]!r}, which is no rule", missing[1])
    terminals = _terminals(rules)
    lark = {name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)}
    lines = [f"start: {lark['root']}"]
    for name, rule in rules.items():
        parts = [lark[rule.names[place][0]] if place in rule.names else part for place, part in enumerate(rule.parts)]
        lines.append(f"{lark[name]}: {' '.join(parts) or quoted('')}")
    return "\n".join(lines)


def quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _read(grammar: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    depth, tokens = 0, list(_tokens(grammar))
    for number, (kind, token, line) in enumerate(tokens):
        following = tokens[number + 1][0] if number + 1 < len(tokens) else ""
        if kind == "name" and following == "is":
            if depth:
                raise _error("'(' is not closed", line)
            rule = rules[token] = _Rule()
        elif kind == "line":
            continue
        elif rule is None or (kind == "is" and tokens[number - 1][0] != "name"):
            raise _error(f"a rule's name and ::= must come before {token!r:.40}", line)
        elif kind != "is":
            depth += (token == "(") - (token == ")") if kind == "sign" else 0
            if depth < 0:
                raise _error("')' closes nothing", line)
            _add(rule, kind, token, line)
    if depth:
        raise _error("'(' is not closed")
    return rules


def _tokens(grammar: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, line)."""
    place, line = 0, 1
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None:
            raise _error(f"{grammar[place : place + 20]!r} cannot be read", line)
        place = found.end()
        kind = found.lastgroup or ""
        if found["least"] is not None:
            yield "count", f"{{{found['least']}{found['comma']}{found['most']}}}", line
        elif kind:
            yield kind, found[0], line
        line += kind == "line"


def _add(rule: _Rule, kind: str, token: str, line: int) -> None:
    last = rule.parts[-1] if rule.parts else "("
    if kind == "name":
        rule.names[len(rule.parts)] = (token, line)
        rule.add(token)
    elif kind == "text":
        rule.add(quoted("".join(_characters(token[1:-1], line))))
    elif kind == "set":
        rule.add(_set(token, line))
    elif token == ".":
        rule.add("/(?s:.)/")
    elif kind == "count" or token in "*+?":
        if last in ("(", "|"):
            raise _error(f"{token!r} repeats nothing", line)
        rule.parts[-1] += token
    else:
        if token in "|)" and last in ("(", "|"):
            rule.add(quoted(""))
        rule.add(token)


def _set(token: str, line: int) -> str:
    """Translate a set of characters to a regular expression of Lark."""
    inside = token[1:-1]
    negated, items = inside.startswith("^"), [*_CHARACTER.findall(inside.removeprefix("^"))]
    if not items:
        raise _error("[] allows no character", line)
    made = ["-" if item == "-" and 0 < place < len(items) - 1 else _code(_character(item, line)) for place, item in enumerate(items)]
    return f"/[{'^' if negated else ''}{''.join(made)}]/"


def _characters(text: str, line: int) -> Iterator[str]:
    return (_character(found, line) for found in _CHARACTER.findall(text))


def _character(item: str, line: int) -> str:
    """The character itself, or the one that an escape means."""
    if not item.startswith("\\"):
        return item
    if item[1] in "xuU" and len(item) > 2:
        code = int(item[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _error(f"{item} is no character", line)
        return chr(code)
    if item[1] not in _ESCAPES and item[1] not in _LITERALLY:
        raise _error(f"{item!r} is no escape", line)
    return _ESCAPES.get(item[1], item[1])


def _code(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Names of rules that are not recursive and have at most `_LONGEST_TERMINAL` characters with the rules that they refer to."""
    waits = {name: len({other for other, _ in rule.names.values()}) for name, rule in rules.items()}
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for other in {other for other, _ in rule.names.values()}:
            used_by[other].append(name)
    sizes: dict[str, int] = {}
    ready = [name for name, count in waits.items() if not count]
    while ready:
        name = ready.pop()
        rule = rules[name]
        size = sum(sizes[rule.names[place][0]] if place in rule.names else len(part) for place, part in enumerate(rule.parts))
        if size > _LONGEST_TERMINAL:
            continue
        sizes[name] = size
        for user in used_by[name]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return set(sizes)


def _error(what: str, line: int | None = None) -> SamplingError:
    return SamplingError(f"structure: grammar: it is not GBNF: {f'line {line}: ' if line else ''}{what}")
