"""Builder of Lark grammars for llguidance: rules, literals with special tokens, arguments in any order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .gbnf import quoted
from .grammar import WHITESPACE, as_lark_regex

_ID = "{id}"
"""Placeholder in a format's literal for a number or an id."""
_MOST_IN_ANY_ORDER = 60
"""Limit of a parametric rule, whose state has 64 bits."""


def escaped(text: str) -> str:
    """Return a text escaped for a regular expression of Lark."""
    plain = "".join(c if c.isalnum() or c in "<>_" or ord(c) > 127 or c in "\n\t\r" else f"\\{c}" for c in text)
    return plain.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


class GrammarRules:
    """Rules of a grammar. Each method returns an expression for use in another rule."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """Create an empty grammar. `special_tokens` maps texts to ids; in literals they become tokens."""
        self._special_tokens = special_tokens
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._count = 0

    def grammar(self, start: str) -> str:
        """Return the grammar's text."""
        return "\n".join([f"start: {start}", *self._lines])

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule, or reuse the one with the same body."""
        key = f"{lazy} {body}"
        if key not in self._names:
            self._names[key] = self._new()
            self._lines.append(f"{self._names[key]}{'[lazy]' if lazy else ''}: {body}")
        return self._names[key]

    def recursive(self, body: Callable[[str], str]) -> str:
        """Add a recursive rule; `body` maps the rule's name to its body. Equal bodies share a rule."""
        key = f"recursive {body('.')}"
        if key not in self._names:
            name = self._names[key] = self._new()
            self._lines.append(f"{name}: {body(name)}")
        return self._names[key]

    def terminal(self, *expressions: str) -> str:
        """Return a terminal that matches all of these regular expressions."""
        return self._terminal(" & ".join(f"/{as_lark_regex(each)}/" for each in expressions))

    def text_of(self, options: Sequence[str]) -> str:
        """Return one terminal for all of these texts, because each option of a rule would cost time in every step."""
        return self._terminal(" | ".join(map(quoted, options)))

    def one_of(self, expressions: Sequence[str]) -> str:
        """Return an alternative of the expressions."""
        return expressions[0] if len(expressions) == 1 else self.rule(" | ".join(expressions))

    def literal(self, text: str) -> str:
        """Return a fixed text with special tokens as tokens and placeholders expanded."""
        if not text:
            return '""'
        parts = self.split(text)
        made = [self.rule("/[0-9A-Za-z_\\-]{1,32}/") if part == _ID else quoted(part) for part in parts if isinstance(part, str)]
        texts = iter(made)
        return " ".join(next(texts) if isinstance(part, str) else f"<[{part}]>" for part in parts)

    def split(self, text: str) -> list[str | int]:
        """Split a literal into texts and ids of special tokens."""
        inside = sorted((token for token in self._special_tokens if token in text), key=len, reverse=True)
        found = re.split(f"({'|'.join(map(re.escape, [*inside, _ID]))})", text)
        return [self._special_tokens.get(part, part) for part in found if part]

    def text_until(self, end: str, least: int = 0, most: int | None = None) -> str:
        """Return free text of `least` to `most` characters, followed by the first `end`."""
        first, *rest = self.split(end)
        count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        if isinstance(first, int):
            return self.rule(f"/(?s:.{count})/ {self.literal(end)}")
        body = self.rule(f"/(?s:.{count}){escaped(first)}/", lazy=True)
        return " ".join([body, *(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in rest)])

    def json(self, schema: Any) -> str:
        """Return JSON of a normalized schema, with bounded whitespace."""
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        whole = {**schema, **options} if isinstance(schema, Mapping) else options
        return self.rule("%json " + json.dumps(whole, ensure_ascii=True))

    def any_order(self, items: Sequence[tuple[bool, str]], separator: str = "") -> str:
        """Return items of (required, expression) in any order, each at most once, with all required ones."""
        ordered = sorted(items, key=lambda item: not item[0])
        required = sum(is_required for is_required, _ in ordered)
        if not ordered:
            return '""'
        if len(ordered) > _MOST_IN_ANY_ORDER:
            return self._in_order(ordered, separator)
        first, later = self._new(), self._new()
        end = f'"" %if is_ones([0:{required}])' if required else '""'
        begun = [f"{expression} {later}::set_bit({bit})" for bit, (_, expression) in enumerate(ordered)]
        between = f"{quoted(separator)} " if separator else ""
        others = [f"{between}{each} %if bit_clear({bit})" for bit, each in enumerate(begun)]
        self._lines.append(f"{first}::_: {' | '.join([*([] if required else [quoted('')]), *begun])}")
        self._lines.append(f"{later}::_: {' | '.join([end, *others])}")
        return f"{first}::0"

    def _in_order(self, items: Sequence[tuple[bool, str]], separator: str) -> str:
        """Return the items in their order, for more items than a parametric rule supports."""
        between = f"{quoted(separator)} " if separator else ""
        rest = [f"({between}{expression})" if required else f"({between}{expression})?" for required, expression in items]
        if not items[0][0] and separator:  # the first item present is unknown
            return self.rule(
                f"({self.rule(' | '.join(each for _, each in items))} ({between}{self.rule(' | '.join(each for _, each in items))})*)?"
            )
        return self.rule(" ".join([items[0][1] if items[0][0] else f"({items[0][1]})?", *rest[1:]]))

    def _terminal(self, body: str) -> str:
        key = f"T {body}"
        if key not in self._names:
            self._names[key] = self._new().upper()
            self._lines.append(f"{self._names[key]}: {body}")
        return self._names[key]

    def _new(self) -> str:
        self._count += 1
        return f"r{self._count}"
