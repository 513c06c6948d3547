"""Prepares clients' JSON Schemas for llguidance: drops annotations and locates unsupported parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any

from ..structure import KEYWORDS, parts, with_parts
from .schema_limits import check_limits
from .schema_parts import DATA, use_pointers

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance enforces. Others are annotations by the specification and are dropped."""
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""Pydantic's pattern of a `Decimal`: an optional sign, then digits with at most one point."""
_DECIMAL_PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)$"
_OPTIONS = "x-guidance"
"""Key of llguidance's own options in a schema, which clients must not set."""

MAX_DEPTH = 120
"""Maximum nesting of a schema; llguidance reads 128 levels of JSON."""
_LONGEST_SEARCH_S = 0.05
"""CPU seconds for locating a fault; after that the path found so far is reported."""


def normalized(schema: Any) -> Any:
    """Return a schema without annotations and trivial `propertyNames`, with its references as JSON pointers.

    Raises `RecursionError` for a schema that is nested too deeply, `SamplingError` for one beyond the limits of `schema_limits.py`.
    """
    plain = _without_annotations(schema, 0)
    if isinstance(plain, dict):
        use_pointers(plain)
    check_limits(plain)
    return plain


def _without_annotations(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if depth > MAX_DEPTH:
        raise RecursionError
    plain = {key: value for key, value in schema.items() if key != _OPTIONS}
    if isinstance(plain.get("format"), str) and plain["format"] not in _FORMATS:
        del plain["format"]
    if plain.get("pattern") == _DECIMAL:
        plain["pattern"] = _DECIMAL_PLAIN
    if plain.get("propertyNames") in ({"type": "string"}, {}, True):  # zod writes these for a record: any name
        del plain["propertyNames"]
    plain = with_parts(plain, lambda _, part: _without_annotations(part, depth + 1))
    others = {key for key in plain if key not in KEYWORDS and key not in DATA}  # references may point into these
    return {key: _without_annotations(value, depth + 1) if key in others else value for key, value in plain.items()}


def fault_path(schema: Any, fault_of: Callable[[Any], str], fault: str | None = None) -> str:
    """Return the path of a schema's fault, such as `properties.age`; "" for the schema itself.

    `fault_of` returns the fault of a schema or "". `fault` is that of this schema. The path leads to the innermost part that has the same
    fault on its own.
    """
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
