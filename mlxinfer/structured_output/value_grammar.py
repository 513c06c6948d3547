"""Grammar rules of arguments that are not JSON: tagged, Python's and Gemma's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..output_format.format import CallFormat
from ..output_format.schema_types import referenced, types_of
from .gbnf import quoted
from .grammar_rules import GrammarRules

_KEY = "{key}"
_NOTES = frozenset(
    {"type", "title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions", "format", "deprecated"}
)
_OBJECT = _NOTES | {"properties", "required", "additionalProperties"}
_TEXT = _NOTES | {"minLength", "maxLength", "enum", "const"}
_KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Supported keywords by type; they do not apply to values of other types."""
_VALUE = _NOTES.union(*_KEYWORDS.values())
_DEEPEST = 12
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,3})?/"
_INTEGER = "/-?(0|[1-9][0-9]{0,17})/"
_MARKS = ("'", '"')
"""Python's quotes; templates write either."""
_ESCAPE = r"\\(['\\nt\"]|x[0-9a-f]{2}|u([0-9a-ce-f][0-9a-f]{3}|d[0-7][0-9a-f]{2}))"
"""Escapes without surrogates."""
_BARE_KEY = r"/[\w.\-]([\w.\- ]{0,62}[\w.\-])?/"
"""An unquoted key of Gemma's format."""
_ASCII_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
"""ASCII classes of ECMAScript; Rust's classes cover Unicode."""


class UnsupportedArgumentError(Exception):
    """A schema has a keyword that is not supported in this format. The message names it."""


@dataclass(frozen=True, slots=True)
class _Words:
    """Spellings that differ between formats of values."""

    true: str
    false: str
    null: str
    comma: str
    colon: str
    booleans: tuple[str, ...]
    """Spellings of booleans in chat templates."""
    nulls: tuple[str, ...] = ("None", "null")
    """Spellings of null in chat templates."""


_BOOLEANS = ("true", "false", "True", "False")
_PYTHON = _Words("True", "False", "None", ", ", ": ", _BOOLEANS)
_GEMMA = _Words("true", "false", "null", ",", ":", ("true", "false"))


class ArgumentRules:
    """Writes the rules of one tool's arguments. With `exact`, unsupported keywords raise `UnsupportedArgumentError`."""

    def __init__(self, rules: GrammarRules, calls: CallFormat, schema: Any, *, exact: bool) -> None:
        self._rules = rules
        self._calls = calls
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self._exact = exact
        self._made: dict[tuple[int, int], tuple[Mapping[str, Any], str]] = {}
        self._words = _PYTHON if calls.kind == "pythonic" else _GEMMA

    def arguments(self) -> str:
        """Return an expression of all arguments, up to the end of the call."""
        root = self._resolved(self._root)
        self._check(root, _OBJECT)
        if self._calls.kind == "tagged":
            return self._tagged(root)
        if self._calls.kind == "pythonic":
            items = [(required, f"{quoted(key + '=')} {self._value(each, 0)}") for key, each, required in _properties(root)]
            return self._rules.any_order(items, ", ")
        closed = {"additionalProperties": False} if root.get("properties") == {} else {}  # a tool without arguments gets none
        return self._value({**root, "type": "object", **closed}, 0)

    def _tagged(self, root: Mapping[str, Any]) -> str:
        calls, rules = self._calls, self._rules
        if "properties" not in root:
            free = rules.rule("/[A-Za-z0-9_.\\-]{1,64}/")
            end = calls.value_end.replace(_KEY, "")
            return f"({rules.literal(calls.key_begin)} {free} {rules.literal(calls.key_end.replace(_KEY, ''))} {rules.text_until(end)})*"
        return rules.any_order([(required, self._argument(key, each)) for key, each, required in _properties(root)])

    def _argument(self, key: str, schema: Any) -> str:
        calls, rules = self._calls, self._rules
        types = types_of(self._root, key)
        is_text = types is None or "string" in types
        key_end = calls.key_end_json if calls.key_end_json and not is_text else calls.key_end
        begin = rules.literal(calls.key_begin) + " " + quoted(key) + " " + rules.literal(key_end.replace(_KEY, key))
        end = calls.value_end.replace(_KEY, key)
        resolved = self._resolved(schema)
        options = self._checked_options(resolved)
        if options:
            written = [quoted(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)) for one in options]
            return f"{begin} {rules.one_of(written)} {rules.literal(end)}"
        if types == frozenset({"boolean"}) and resolved.keys() <= _NOTES:
            return f"{begin} {rules.one_of([quoted(word) for word in _BOOLEANS])} {rules.literal(end)}"
        if not is_text:
            return f"{begin} {rules.json(self._with_shared(schema))} {rules.literal(end)}"
        if types == frozenset({"string"}):
            self._check(resolved, _TEXT)
            return f"{begin} {rules.text_until(end, *self._bounds(resolved, 'Length'))}"
        return f"{begin} {rules.text_until(end)}"

    def _with_shared(self, schema: Any) -> Any:
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return {**schema, **shared} if isinstance(schema, Mapping) else schema

    def _value(self, schema: Any, depth: int) -> str:
        """Return an expression of one value in Python's or Gemma's format."""
        schema = self._resolved(schema)
        key = id(schema), depth
        if key not in self._made:
            self._made[key] = schema, self._new_value(schema, depth)
        return self._made[key][1]

    def _new_value(self, schema: Mapping[str, Any], depth: int) -> str:
        options = self._checked_options(schema)
        if options:
            self._check(schema, _NOTES | {"enum", "const"})
            return self._rules.one_of([self._constant(one) for one in options])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list) and schema[keyword] and depth < _DEEPEST:
                self._check(schema, _NOTES | {keyword})
                return self._rules.one_of([self._value(each, depth + 1) for each in schema[keyword]])
        kinds = schema.get("type")
        names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        if not names or depth >= _DEEPEST:
            self._check(schema, _NOTES)
            return self._any()
        return self._rules.one_of([self._typed(str(name), schema, depth) for name in names])

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        rules, words = self._rules, self._words
        self._check(schema, _VALUE)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            item = self._value(schema.get("items") if isinstance(schema.get("items"), Mapping) else {}, depth + 1)
            return rules.rule(f'"[" {_repeated(item, quoted(words.comma), *self._bounds(schema, "Items"))} "]"')
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            limits = {key: schema[key] for key in sorted(_KEYWORDS["number"] & schema.keys())}
            if limits:
                return rules.json({"type": kind, **limits})
            return rules.rule(_INTEGER if kind == "integer" else _NUMBER)
        return rules.one_of([quoted(word) for word in (words.booleans if kind == "boolean" else words.nulls)])

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        rules, words = self._rules, self._words
        if schema.get("properties") or ("properties" in schema and schema.get("required")):
            items = [(need, f"{self._key(key)} {self._value(each, depth + 1)}") for key, each, need in _properties(schema)]
            return rules.rule(f'"{{" {rules.any_order(items, words.comma)} "}}"')
        if "required" in schema and self._exact and schema["required"]:
            raise UnsupportedArgumentError("required without properties is not supported in the form in which this model writes calls")
        free = schema.get("additionalProperties", True)
        if free is False:
            return quoted("{}")
        value = self._value(free, depth + 1) if isinstance(free, Mapping) and free else self._any()
        return rules.rule(self._free_object(value))

    def _free_object(self, value: str) -> str:
        """Return an expression of an object with any keys."""
        words = self._words
        item = f"{self._string({})} {quoted(words.colon)} {value}" if words is _PYTHON else f"{self._bare_key()} {value}"
        return f'"{{" ({item} ({quoted(words.comma)} {item})*)? "}}"'

    def _bounds(self, schema: Mapping[str, Any], what: str) -> tuple[int, int | None]:
        """Return the keywords `min…` and `max…` of `what`; a whole number may be written as 2.0."""
        least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
        for key, count in ((f"min{what}", least), (f"max{what}", most)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, (int, float)) or count < 0 or count != int(count)):
                raise UnsupportedArgumentError(f"{key} must be a whole number, not {count!r:.40}")
        if most is not None and most < least:
            raise UnsupportedArgumentError(f"max{what} is below min{what}")
        return int(least), None if most is None else int(most)

    def _any(self) -> str:
        """Return an expression of any value."""
        scalar = self._rules.one_of([self._typed(kind, {}, _DEEPEST) for kind in ("string", "number", "boolean", "null")])
        comma = quoted(self._words.comma)
        return self._rules.recursive(lambda own: f'{scalar} | "[" ({own} ({comma} {own})*)? "]" | {self._free_object(own)}')

    def _constant(self, value: Any) -> str:
        if isinstance(value, bool):
            return quoted(self._words.true if value else self._words.false)
        if isinstance(value, str):
            quote = self._rules.literal(self._calls.quote)
            return self._python_text(value) if self._words is _PYTHON else self._rules.rule(f"{quote} {quoted(value)} {quote}")
        return quoted(self._words.null if value is None else json.dumps(value, ensure_ascii=False))

    def _string(self, schema: Mapping[str, Any]) -> str:
        rules, quote = self._rules, self._calls.quote
        least, most = self._bounds(schema, "Length")
        count = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        pattern = self._pattern(schema)
        if self._words is _PYTHON:
            if pattern is None:
                return rules.rule(" | ".join(rf"/{mark}([^{mark}\\\n]|{_ESCAPE}){count}{mark}/" for mark in _MARKS))
            # Without escapes, which would change the text.
            return rules.one_of([rules.terminal(rf"{mark}[^{mark}\\\n]{count}{mark}", f"{mark}{pattern}{mark}") for mark in _MARKS])
        if pattern is None:
            return rules.rule(f"{rules.literal(quote)} {rules.text_until(quote, least, most)}")
        if not isinstance(rules.split(quote)[0], int):
            raise UnsupportedArgumentError("pattern is not supported in the form in which this model writes calls")
        return rules.rule(f"{rules.literal(quote)} {rules.terminal(f'(?s:.{count})', pattern)} {rules.literal(quote)}")

    def _pattern(self, schema: Mapping[str, Any]) -> str | None:
        pattern = schema.get("pattern")
        if pattern is None:
            return None
        whole = whole_text(pattern) if isinstance(pattern, str) else None
        if whole is None:
            raise UnsupportedArgumentError(f"pattern {pattern!r:.60} is not supported in the form in which this model writes calls")
        return whole

    def _key(self, key: str) -> str:
        return f"{self._python_text(key)} {quoted(self._words.colon)}" if self._words is _PYTHON else quoted(key + self._words.colon)

    def _python_text(self, text: str) -> str:
        """Return a fixed text with either kind of quotes."""
        return self._rules.one_of([quoted(one) for one in dict.fromkeys((repr(text), json.dumps(text, ensure_ascii=False)))])

    def _bare_key(self) -> str:
        return f'{self._rules.rule(_BARE_KEY)} ":"'

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(_DEEPEST):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = referenced(schema["$ref"], self._root)
        return schema if isinstance(schema, Mapping) else {}

    def _checked_options(self, schema: Mapping[str, Any]) -> list[Any] | None:
        options = _options(schema)
        if options == [] and self._exact:
            raise UnsupportedArgumentError("enum has no value of its type")
        return options

    def _check(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        unknown = schema.keys() - known
        if unknown and self._exact:
            raise UnsupportedArgumentError(f"{min(unknown)} is not supported in the form in which this model writes calls")


def _repeated(item: str, separator: str, least: int, most: int | None) -> str:
    """Return `least` to `most` items with separators."""
    if most == 0:
        return '""'
    if most == 1:
        return item if least else f"({item})?"
    further = "*" if least < 2 and most is None else f"{{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
    whole = f"{item} ({separator} {item}){further}"
    return whole if least else f"({whole})?"


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, schema, required)."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    for key in dict.fromkeys([*properties, *required]):
        found = properties.get(key, {})
        if key not in required and isinstance(found, Mapping) and _options(found) == []:
            continue  # no value fits, so it is always omitted
        yield key, found, key in required


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the listed values of `enum` or `const` that fit the schema's type; None if there is no list."""
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        options = list(schema["enum"])
    elif "const" in schema:
        options = [schema["const"]]
    else:
        return None
    kinds = schema.get("type")
    names = {kinds} if isinstance(kinds, str) else set(map(str, kinds)) if isinstance(kinds, list) else None
    return [one for one in options if names is None or names & _NAMES[type(one)]]


_NAMES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def whole_text(pattern: str) -> str | None:
    """Convert a JSON Schema `pattern`, which matches anywhere, to a Rust expression for the whole text; None for inner anchors."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not _is_escaped(pattern)
    inner = pattern[int(begins) : len(pattern) - int(ends)]
    made: list[str] = []
    depth, in_set, place = 0, False, 0
    while place < len(inner):
        character = inner[place]
        place += 1
        if character == "\\" and place < len(inner):
            found = _ASCII_CLASSES.get(inner[place])
            escape = f"\\{inner[place]}" if found is None else found if in_set else f"[{found}]"
            made.append(escape)
            place += 1
            continue
        if in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
            if inner[place : place + 1] == "^":
                character += "^"
                place += 1
        elif character in "^$" or (character == "|" and not depth and (begins or ends)):
            return None
        depth += 0 if in_set else (character == "(") - (character == ")")
        made.append(character)
    body = f"(?:{''.join(made)})"
    return f"{'' if begins else '(?s:.*)'}{body}{'' if ends else '(?s:.*)'}"


def _is_escaped(pattern: str) -> bool:
    """Return True if the last character is escaped."""
    before = pattern[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
