"""Grammars of clients that nobody needs, told before they are compiled: what would take llguidance too long, or its stack."""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import Any

from ..errors import SamplingError
from ..records import dataclass
from .reference_chain import longest_chain
from .schema import normalized

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\\\n) | (?P<text>"(?:[^"\\\n]|\\.)*"i?) | (?P<regex>/(?![*/])(?:[^/\\\n]|\\.)+/[a-z]*)
    | (?P<json>%json\b)
    | (?P<name>[_?!]*[A-Za-z][A-Za-z0-9_]*)(?:\[[^\]\n]*\])?(?:(?:::|\.)[^\s:|]+)?(?P<defines>\s*:(?!:))?
    | (?P<special><[^>\n]*>) | (?P<open>\() | (?P<close>\)) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
MOST_RULES = 2000
LONGEST_TERMINAL = 20_000
"""Characters of a terminal next to the grammar's own, with each reference written out."""
LONGEST_CHAIN = 400
"""Rules that lead into one another, and brackets: each takes a part of the stack."""
_DEFINITION = re.compile(r"^[^\n:\"/|]+:", re.MULTILINE)
_DECODER = json.JSONDecoder()


@dataclass(slots=True)
class _Rule:
    size: int = 0
    """Characters of its texts and expressions."""
    names: list[str] = field(default_factory=list)
    """What it refers to, as often as it does."""
    depth: int = 1
    """Brackets inside one another, and one."""


@dataclass(frozen=True, slots=True)
class LarkText:
    """What is known of a grammar without compiling it."""

    rules: dict[str, _Rule]
    """By their names."""
    text_size: int
    """Characters of all its texts, of which an answer may have to have all."""


def read_lark(grammar: str) -> LarkText:
    """Looks through a grammar, which need not be right. Raises `SamplingError` for a schema in it that cannot be held."""
    rules: dict[str, _Rule] = {"": _Rule()}
    rule, place, depth, text_size = rules[""], 0, 1, 0
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        assert found is not None  # `other` takes any character
        place = found.end()
        kind = found.lastgroup
        if found["defines"] is not None:
            rule, depth = rules.setdefault(found["name"].lstrip("?!"), _Rule()), 1
        elif found["name"] is not None:
            rule.names.append(found["name"].lstrip("?!"))
        elif kind in ("text", "regex"):
            rule.size += len(found[0])
            text_size += len(found[0])
        elif kind == "json":
            place = _checked_json(grammar, place)
        elif kind in ("open", "close"):
            depth += 1 if kind == "open" else -1
            rule.depth = max(rule.depth, depth)
    return LarkText(rules, text_size)


def check_count(grammar: str) -> None:
    """Raises `SamplingError` if a grammar, in Lark or GBNF, has too many rules."""
    count = len(_DEFINITION.findall(grammar))
    if count > MOST_RULES:
        raise _error(f"it has {count} rules, and {MOST_RULES} are allowed")


def check_lark(grammar: str) -> LarkText:
    """The same, and raises `SamplingError` that names the rule where it is too deep or too long."""
    lark = read_lark(grammar)
    references = {name: rule.names for name, rule in lark.rules.items()}
    levels, first = longest_chain(references, {name: rule.depth for name, rule in lark.rules.items()})
    if levels > LONGEST_CHAIN:
        raise _error(f"rule {first!r} leads {levels} rules and brackets deep, and {LONGEST_CHAIN} are allowed")
    most = LONGEST_TERMINAL + len(grammar)
    sizes: dict[str, int] = {}
    for name in lark.rules:
        if name.isupper() and _written_out(name, lark.rules, sizes, most) > most:
            raise _error(f"terminal {name!r} is longer than {most} characters with what it refers to written out")
    return lark


def _written_out(name: str, rules: dict[str, _Rule], sizes: dict[str, int], most: int) -> int:
    """Characters of a terminal with each reference written out, or more than `most`. Chains are short: see `LONGEST_CHAIN`."""
    if name not in sizes:
        sizes[name] = 0  # what refers to itself is refused later
        rule = rules[name]
        total = rule.size
        for other in rule.names:
            total += _written_out(other, rules, sizes, most) if other in rules else 0
            if total > most:
                break
        sizes[name] = total
    return sizes[name]


def _checked_json(grammar: str, place: int) -> int:
    """Where a schema ends that begins here. Others are left to llguidance to refuse."""
    begin = re.compile(r"\s*").match(grammar, place)
    assert begin is not None
    try:
        schema: Any
        schema, end = _DECODER.raw_decode(grammar, begin.end())
        normalized(schema)
    except ValueError:
        return place
    except RecursionError:
        raise _error("a schema in it is nested too deeply") from None
    return end


def _error(what: str) -> SamplingError:
    return SamplingError(f"structure: grammar: {what}")
