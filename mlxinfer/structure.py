"""Structures of answers for `SamplingParams.structure`: plain values, validated at construction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Union

from .errors import SamplingError
from .util.dataclass import dataclass

MAX_GRAMMAR_BYTES = 256 * 1024
"""Maximum bytes of a schema, expression or grammar in UTF-8."""


@dataclass(frozen=True, slots=True)
class Schema:
    """JSON that matches a JSON Schema.

    Raises `SamplingError` for an invalid schema. Unsupported keywords are reported with the request.
    """

    schema: Any = field(compare=False)
    """A dict, a pydantic model or type adapter, or JSON text; stored as a dict or a bool. A pydantic model allows only its own fields,
    unless it has `extra="allow"`."""
    text: str = field(init=False, repr=False)
    """The schema as JSON text; equal schemas have equal texts."""

    def __post_init__(self) -> None:
        schema = _plain_schema(self.schema)
        object.__setattr__(self, "schema", schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SamplingError(f"structure: the schema is not JSON: {error}") from None
        object.__setattr__(self, "text", _within_size("schema", text))


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that fully matches a regular expression of Rust's `regex` syntax, which has no look-around and no back-references."""

    pattern: str
    """Regular expression."""

    def __post_init__(self) -> None:
        _within_size("regex", self.pattern)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts."""

    options: Sequence[str]
    """Allowed texts; stored as a tuple."""

    def __post_init__(self) -> None:
        options = self.options
        if isinstance(options, str) or not options or not all(isinstance(one, str) and one for one in options):
            raise SamplingError(f"structure: choice must be a list of non-empty texts, not {options!r:.100}")
        object.__setattr__(self, "options", tuple(options))
        _within_size("choice", "".join(options))


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a context-free grammar in llguidance's dialect of Lark (github.com/guidance-ai/llguidance, docs/syntax.md)."""

    grammar: str
    """Grammar with the first rule `start`."""

    def __post_init__(self) -> None:
        _within_size("grammar", self.grammar)


Structure = Union[Schema, Regex, Choice, Lark]


def _plain_schema(given: Any) -> dict[str, Any] | bool:
    for method in ("model_json_schema", "json_schema"):  # a pydantic model, a pydantic.TypeAdapter
        if callable(getattr(given, method, None)):
            given = closed(getattr(given, method)())
            break
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"structure: the schema is not JSON: {error}") from None
    if isinstance(given, bool):
        return given
    if not isinstance(given, Mapping):
        raise SamplingError(f"structure: a schema is a dict, a pydantic model or JSON text, not a {type(given).__name__}")
    return dict(given)


_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords with lists of schemas."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema per name."""
KEYWORDS = frozenset({*_ONE, *LISTED, *NAMED})
"""Keywords with one or more schemas."""
_JOINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "not"})
"""Keywords that may allow properties which the schema does not name."""
_SAID = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})


def parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Yield (keyword, name or index below it or None, schema) of the direct subschemas of a JSON Schema."""
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            yield key, None, schema[key]
    for key in LISTED:
        if isinstance(schema.get(key), list):
            yield from ((key, number, part) for number, part in enumerate(schema[key]))
    for key in NAMED:
        if isinstance(schema.get(key), Mapping):
            yield from ((key, name, part) for name, part in schema[key].items())


def with_parts(schema: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a JSON Schema with each of its `parts` replaced by `change(keyword, part)`."""
    made = dict(schema)
    for key, below, part in parts(schema):
        if below is None:
            made[key] = change(key, part)
            continue
        if made[key] is schema[key]:
            made[key] = made[key].copy()
        made[key][below] = change(key, part)
    return made


def closed(schema: Any) -> Any:
    """Return a JSON Schema that forbids unnamed properties, except where it states otherwise or combines several schemas.

    Raises `SamplingError` for a schema that is nested too deeply.
    """
    try:
        return _closed(schema)
    except RecursionError:
        raise SamplingError("structure: the schema is nested too deeply") from None


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    joined = _JOINED if "properties" in schema else _JOINED - {"anyOf", "oneOf"}
    made = with_parts(schema, lambda key, part: part if key in joined else _closed(part))
    if "properties" in made and not made.keys() & (_SAID | _JOINED):
        made["additionalProperties"] = False
    return made


def _within_size(kind: str, text: object) -> str:
    if not isinstance(text, str) or not text:
        raise SamplingError(f"structure: {kind} must be a non-empty text, not {text!r:.100}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise SamplingError(f"structure: {kind} is not valid Unicode: a lone surrogate at character {error.start}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise SamplingError(f"structure: {kind} has {size} bytes, and {MAX_GRAMMAR_BYTES} are allowed: make it shorter")
    return text


JSON_OBJECT = Schema({"type": "object"})
"""Any JSON object."""
