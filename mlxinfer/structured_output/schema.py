"""JSON Schemas as clients send them, made ready for llguidance: what asks for nothing is dropped, and what it cannot hold is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any

from ..structure import KEYWORDS, parts, with_parts
from .schema_limits import check_limits
from .schema_parts import DATA, use_pointers

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance holds an answer to; by the specification all others are annotations, so they are dropped."""
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""What pydantic writes for a `Decimal`: a sign at most, then digits with at most one point, and not empty."""
_DECIMAL_PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)$"
_OPTIONS = "x-guidance"
"""llguidance reads its own options from this key of a schema; a client's schema does not get to set them."""

MAX_DEPTH = 120
"""Schemas nested deeper than this are refused: llguidance reads 128 levels of JSON."""
_LONGEST_SEARCH_S = 0.05
"""Seconds of a processor that finding the place of a fault may take; then it is told as closely as it is known."""


def normalized(schema: Any) -> Any:
    """The schema without what asks for nothing: formats that are annotations, trivial `propertyNames`. Its references are pointers.

    Raises `RecursionError` for one that is nested too deeply, and `SamplingError` for one that would take too long (`schema_limits.py`)."""
    plain = _plain(schema, 0)
    if isinstance(plain, dict):
        use_pointers(plain)
    check_limits(plain)
    return plain


def _plain(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if depth > MAX_DEPTH:
        raise RecursionError
    plain = {key: value for key, value in schema.items() if key != _OPTIONS}
    if isinstance(plain.get("format"), str) and plain["format"] not in _FORMATS:
        del plain["format"]
    if plain.get("pattern") == _DECIMAL:
        plain["pattern"] = _DECIMAL_PLAIN
    if plain.get("propertyNames") in ({"type": "string"}, {}, True):  # what zod writes for a record: any name
        del plain["propertyNames"]
    plain = with_parts(plain, lambda _, part: _plain(part, depth + 1))
    others = {key for key in plain if key not in KEYWORDS and key not in DATA}  # which references may point into
    return {key: _plain(value, depth + 1) if key in others else value for key, value in plain.items()}


def fault_path(schema: Any, fault_of: Callable[[Any], str], fault: str | None = None) -> str:
    """Where the fault of a schema lies, such as `properties.age`; empty for the schema itself. `fault_of` tells what is wrong with a
    schema, or nothing, and `fault` what that is for this one: the innermost part that by itself has the same fault is where it is."""
    fault = fault_of(schema) if fault is None else fault
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if isinstance(schema, Mapping) else {}
    path: list[str] = []
    end = thread_time() + _LONGEST_SEARCH_S
    node, found = schema, True
    while found:
        found = False
        for key, below, child in parts(node) if isinstance(node, Mapping) else ():
            if thread_time() > end:
                return ".".join(path)
            if isinstance(child, Mapping) and fault_of({**shared, **child}) == fault:
                path.append(key if below is None else f"{key}[{below}]" if isinstance(below, int) else f"{key}.{below}")
                node, found = child, True
                break
    return ".".join(path)
