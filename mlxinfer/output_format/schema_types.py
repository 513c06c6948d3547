"""Types of unquoted arguments, from the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .streaming_json import PYTHON, ValueReader

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
_DEEPEST = 8


def types_of(schema: object, key: str) -> frozenset[str] | None:
    """Return the JSON types that an argument may have; None if the schema does not restrict them."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _types(properties.get(key), schema, 0, {}) if isinstance(properties, Mapping) else None


def _types(schema: Any, root: Any, depth: int, known: dict[str, frozenset[str] | None]) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = None  # a reference to itself restricts nothing
            known[reference] = _types(referenced(reference, root), root, depth + 1, known)
        return known[reference]
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(map(str, given))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return frozenset(_TYPES.get(type(value), "string") for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found = [_types(each, root, depth + 1, known) for each in schema[keyword]]
            told = [types for types in found if types is not None]
            return frozenset(name for types in told for name in types) if told and len(told) == len(found) else None
    if isinstance(schema.get("allOf"), list):
        return next((types for each in schema["allOf"] if (types := _types(each, root, depth + 1, known)) is not None), None)
    return None


def referenced(reference: str, root: Any) -> Any:
    """Return the target of a reference inside the schema; None for any other reference."""
    found = root
    for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if reference.startswith("#/") else None


def json_of(text: str, types: frozenset[str] | None) -> str:
    """Return JSON text of an unquoted value. A value of another type becomes a string."""
    stripped = text.strip()
    found = _literal(stripped)
    if found is not None:
        kind = _TYPES[type(json.loads(found))]
        if types is None:
            return found if kind != "string" else json.dumps(text, ensure_ascii=False)
        if kind in types or (kind == "integer" and "number" in types) or (kind == "number" and "integer" in types):
            return found if kind != "string" or "string" not in types else json.dumps(text, ensure_ascii=False)
        if "string" not in types:
            return found
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str | None:
    """Return JSON text of a JSON or Python literal; None for anything else."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        reader = ValueReader(PYTHON)
        end, found = reader.add(text, 0, True)
        return found if reader.done and end == len(text) else None
    return text


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
