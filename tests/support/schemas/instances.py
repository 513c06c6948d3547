"""Values that fit a schema of `schema_corpus`, and values that were changed a little; `jsonschema` judges whether they still fit."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]
_TEXTS = ["", "a", "Paris", "two words", 'a "quoted" word', "back\\slash", "line\nbreak", "tab\t", "x" * 40, "<b>{}</b>", "1", "null"]
_OF_PATTERN = {
    "^[a-z]+$": ["a", "abc"],
    "^[A-Z]{2}$": ["DE", "FR"],
    "^[0-9]{4}$": ["2024", "0000"],
    "^v[0-9]+\\.[0-9]+$": ["v1.0", "v12.34"],
    "^[a-z][a-z0-9-]{0,20}$": ["web", "a-1"],
    "^#[0-9a-f]{6}$": ["#00ff7f"],
    "^(GET|POST|PUT)$": ["GET", "PUT"],
    "^(?!con$).*": ["aux"],
}
_OF_FORMAT = {
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:30:00Z",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "192.0.2.1",
    "email": "ann@example.com",
    "uri": "https://example.com/a?b=c",
}
_ANYTHING = [None, True, 0, -1.5, "text", [], {}, [1, "a"], {"a": {"b": []}}, 123456789012345678, 1e300, 2.5e-7]


def instance(schema: Schema, r: Random, root: Schema, depth: int = 0) -> Any:
    """A value that fits, its properties in the order of the schema; or not, where the schema asks for what is not looked at."""
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return instance(target, r, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return r.choice(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return instance(r.choice(schema[key]), r, root, depth)
    if "allOf" in schema:
        joined: Schema = {"type": "object", "properties": {}, "required": []}
        for part in schema["allOf"]:
            joined["properties"] |= part.get("properties", {})
            joined["required"] += part.get("required", [])
        return instance(joined, r, root, depth)
    kind = schema.get("type")
    return _OF_TYPE.get(r.choice(kind) if isinstance(kind, list) else kind, _anything)(schema, r, root, depth)


def _anything(schema: Schema, r: Random, root: Schema, depth: int) -> Any:
    return r.choice(_ANYTHING)


def _text(schema: Schema, r: Random, root: Schema, depth: int) -> str:
    if "pattern" in schema:
        return r.choice(_OF_PATTERN[schema["pattern"]])
    if schema.get("format") in _OF_FORMAT:
        return _OF_FORMAT[schema["format"]]
    text = r.choice(_TEXTS)[: schema.get("maxLength")]
    return text or "x" * schema.get("minLength", 0)


def _number(schema: Schema, r: Random, root: Schema, depth: int) -> float:
    if "multipleOf" in schema:
        return schema["multipleOf"] * r.randint(0, 9)
    if "minimum" in schema or "maximum" in schema:
        least, most = schema.get("minimum", -1000), schema.get("maximum", 1000)
        return r.choice([least, r.randint(int(least), int(most))])
    whole = [0, 7, -3, 2**53, -(2**63), 2**64 - 1]
    return r.choice(whole if schema.get("type") == "integer" else [*whole, 0.1, -2.5, 1e300, 3.141592653589793, 5e-324])


def _list(schema: Schema, r: Random, root: Schema, depth: int) -> list[Any]:
    count = r.randint(schema.get("minItems", 0), min(schema.get("maxItems", 3), 0 if depth > 4 else 3))
    return [instance(schema.get("items", {}), r, root, depth + 1) for _ in range(count)]


def _object(schema: Schema, r: Random, root: Schema, depth: int) -> Schema:
    required, value = schema.get("required", []), {}
    for name, part in schema.get("properties", {}).items():
        if name in required or (depth <= 4 and r.random() < 0.6):
            value[name] = instance(part, r, root, depth + 1)
    if "patternProperties" in schema:
        ((pattern, part),) = schema["patternProperties"].items()
        value |= {name: instance(part, r, root, depth + 1) for name in _OF_PATTERN[pattern]}
    more = schema.get("additionalProperties", True)
    if more is not False and r.random() < 0.3:
        value["zz_more"] = instance(more if isinstance(more, dict) else {}, r, root, depth + 1)
    return value


_OF_TYPE = {
    "string": _text,
    "integer": _number,
    "number": _number,
    "boolean": lambda schema, r, root, depth: r.random() < 0.5,
    "null": lambda schema, r, root, depth: None,
    "array": _list,
    "object": _object,
}


def mutated(value: Any, schema: Schema, r: Random) -> Any:
    """The value with one place changed: something of another type, a name too many or too few, a bit more or less."""
    places: list[tuple[Any, Any]] = []
    _collect(value, places)
    if not places or r.random() < 0.05:
        return r.choice(_ANYTHING)
    parent, key = r.choice(places)
    old = parent[key]
    change = r.random()
    if isinstance(parent, dict) and change < 0.25:
        del parent[key]
    elif isinstance(parent, dict) and change < 0.35:
        parent["zz_other"] = r.choice(_ANYTHING)
    elif isinstance(old, str) and change < 0.6:
        parent[key] = r.choice([old + "!", old[:-1], old * 50, old.upper()])
    elif isinstance(old, (int, float)) and not isinstance(old, bool) and change < 0.6:
        parent[key] = r.choice([old + 1, -old - 1, old + 0.5, old * 1000])
    elif isinstance(old, list) and change < 0.6:
        parent[key] = [*old, *old, None]
    else:
        parent[key] = r.choice(_ANYTHING)
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _collect(value[key], places)
