"""Schemas like those that programs send and publish, made up here, with instances that fit and instances that do not.

Ten kinds, in the proportions of JSONSchemaBench's splits, and with the keywords that no engine can hold about as often as they occur there.
The same seed gives the same schemas.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from jsonschema.validators import validator_for

from .instances import instance, mutated

Schema = dict[str, Any]
SHARES = {
    "functions": 116,
    "kubernetes": 118,
    "mixed": 11,
    "mcp": 8,
    "events": 45,
    "calls": 189,
    "config easy": 216,
    "config medium": 220,
    "config hard": 137,
    "store": 54,
}
"""Number of schemas of each kind among 1,114."""
_WORDS = [
    "user",
    "order",
    "item",
    "city",
    "country",
    "date",
    "email",
    "status",
    "price",
    "amount",
    "count",
    "level",
    "name",
    "title",
    "kind",
    "source",
    "target",
    "region",
    "zone",
    "key",
    "group",
    "owner",
]
_PARTS = ["id", "name", "code", "type", "list", "url", "at", "size", "limit", "path", "mode", "rate", "text", "time"]
PATTERNS = ["^[a-z]+$", "^[A-Z]{2}$", "^[0-9]{4}$", "^v[0-9]+\\.[0-9]+$", "^[a-z][a-z0-9-]{0,20}$", "^#[0-9a-f]{6}$", "^(GET|POST|PUT)$"]
FORMATS = ["date", "date-time", "uuid", "ipv4", "email", "uri", "int32", "int64", "password", "binary"]


@dataclass(frozen=True)
class Case:
    """A schema and what it says to some values."""

    kind: str
    schema: Schema
    valid: list[Any] = field(default_factory=list)
    invalid: list[Any] = field(default_factory=list)


def corpus(count: int = sum(SHARES.values()), seed: int = 0) -> Iterator[Case]:
    """`count` cases, the kinds mixed in their proportions."""
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    Random(seed).shuffle(kinds)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        random = Random(f"{seed} {number} {kind}")
        schema = MAKERS[kind](random)
        yield _case(kind, json.loads(json.dumps(schema)), random)


def _case(kind: str, schema: Schema, random: Random) -> Case:
    validator = validator_for(schema)(schema)  # of the draft that `$schema` names
    case = Case(kind, schema)
    for _ in range(2):
        value = instance(schema, random, schema)
        (case.valid if validator.is_valid(value) else case.invalid).append(value)
        for _ in range(2):
            other = mutated(copy.deepcopy(value), schema, random)
            (case.valid if validator.is_valid(other) else case.invalid).append(other)
    return case


def _name(r: Random) -> str:
    style = r.random()
    one, two = r.choice(_WORDS), r.choice(_PARTS)
    return f"{one}_{two}" if style < 0.5 else one + two.capitalize() if style < 0.8 else one


def _names(r: Random, least: int, most: int) -> list[str]:
    return list(dict.fromkeys(_name(r) for _ in range(r.randint(least, most))))


def _string(r: Random) -> Schema:
    kind = r.random()
    if kind < 0.15:
        return {"type": "string", "enum": sorted({r.choice(_WORDS) for _ in range(r.randint(1, 6))})}
    if kind < 0.25:
        return {"type": "string", "pattern": r.choice(PATTERNS)}
    if kind < 0.35:
        return {"type": "string", "format": r.choice(FORMATS)}
    if kind < 0.5:
        return {"type": "string", "maxLength": r.choice([1, 16, 64, 255, 4096]), "minLength": r.choice([0, 1])}
    return {"type": "string"}


def _scalar(r: Random) -> Schema:
    kind = r.random()
    if kind < 0.55:
        return _string(r)
    if kind < 0.7:
        return {"type": "integer"} | ({"minimum": r.choice([0, 1, -10]), "maximum": r.choice([10, 100, 65535])} if r.random() < 0.5 else {})
    if kind < 0.8:
        return {"type": "number"} | ({"minimum": 0, "maximum": r.choice([1, 99.5, 360])} if r.random() < 0.4 else {})
    if kind < 0.83:
        return {"type": "integer", "multipleOf": r.choice([5, 10])}
    if kind < 0.85:
        return {"const": r.choice(["on", 1, True, None])}
    return {"type": "boolean"}


def _described(r: Random, schema: Schema) -> Schema:
    extra: Schema = {"description": f"The {r.choice(_WORDS)} of the {r.choice(_WORDS)}."} if r.random() < 0.7 else {}
    if r.random() < 0.1:
        extra["title"] = r.choice(_WORDS).title()
    return schema | extra


def _object(
    r: Random, depth: int, *, closed: float = 0.3, leaf: Any = _scalar, nested: float = 0.25, size: tuple[int, int] = (1, 6)
) -> Schema:
    """An object whose values are scalars, arrays, and objects down to `depth`."""
    properties: Schema = {}
    for name in _names(r, *size):
        if depth and r.random() < nested:
            inner = _object(r, depth - 1, closed=closed, leaf=leaf, nested=nested, size=size)
            value = inner if r.random() < 0.6 else {"type": "array", "items": inner}
        elif r.random() < 0.15:
            value = {"type": "array", "items": leaf(r)} | ({"maxItems": r.randint(1, 5)} if r.random() < 0.3 else {})
        else:
            value = leaf(r)
        properties[name] = _described(r, value)
    schema: Schema = {"type": "object", "properties": properties}
    required = [name for name in properties if r.random() < 0.6]
    if required:
        schema["required"] = required
    if r.random() < closed:
        schema["additionalProperties"] = False
    return schema


def _plant(r: Random, schema: Schema, chance: float) -> Schema:
    """With this chance, ask somewhere for what a grammar cannot hold."""
    if r.random() >= chance or not schema.get("properties"):
        return schema
    name = r.choice(list(schema["properties"]))
    fault = r.choice(["oneOf"] * 8 + ["uniqueItems"] * 2 + ["dependencies"] * 2 + ["not", "propertyNames", "if", "look-around"])
    faults: dict[str, Schema] = {
        "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]},
        "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "not": {"not": {"type": "null"}},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
        "look-around": {"type": "string", "pattern": "^(?!con$).*"},
    }
    if fault == "dependencies":
        schema["dependencies" if "draft-07" in schema.get("$schema", "") else "dependentRequired"] = {name: list(schema["properties"])[:1]}
    else:
        schema["properties"][name] = faults[fault]
    return schema


def _functions(r: Random) -> Schema:
    leaf = lambda r: {key: value for key, value in _scalar(r).items() if key in ("type", "enum")} or {"type": "string"}  # noqa: E731
    return _object(r, 1, closed=0.0, leaf=leaf, nested=0.1, size=(1, 5))


def _calls(r: Random) -> Schema:
    return _plant(r, _object(r, 2, closed=0.0, size=(1, 5)), 0.04)


def _mcp(r: Random) -> Schema:
    schema = _object(r, 1, closed=0.8, size=(1, 6))
    for name, value in schema["properties"].items():
        if r.random() < 0.3:
            schema["properties"][name] = {"anyOf": [value, {"type": "null"}], "default": None}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _events(r: Random) -> Schema:
    schema = _object(r, 1, closed=0.9, nested=0.05, size=(2, 9))
    for name, value in schema["properties"].items():
        if isinstance(value.get("type"), str) and "enum" not in value and "format" not in value and r.random() < 0.4:
            schema["properties"][name] = value | {"type": [value["type"], "null"]}
    about = {"vendor": "com.example", "name": _name(r), "format": "jsonschema", "version": "1-0-0"}
    return _plant(r, {"description": "An event.", "self": about, **schema}, 0.04)


def _kubernetes(r: Random) -> Schema:
    kind = r.choice(["Deployment", "Service", "Job", "Ingress"])
    label = {"type": "object", "additionalProperties": {"type": "string"}}
    meta = {"type": "object", "properties": {"name": {"type": "string"}, "labels": label, "annotations": label}, "required": ["name"]}
    port = {"type": "object", "properties": {"containerPort": {"type": "integer", "format": "int32"}, "protocol": {"enum": ["TCP", "UDP"]}}}
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "image": {"type": "string"}, "ports": {"type": "array", "items": port}},
    }
    item["properties"] |= {"limit": either, "env": {"type": ["array", "null"], "items": {"$ref": "#/definitions/pair"}}}
    pair = {"type": "object", "properties": {"name": {"type": "string"}, "value": {"type": ["string", "null"]}}, "required": ["name"]}
    spec = _object(r, 2, closed=0.0, nested=0.3)
    spec["properties"]["containers"] = {"type": "array", "items": item, "x-kubernetes-patch-merge-key": "name"}
    properties = {"apiVersion": {"type": "string", "enum": ["v1", "apps/v1"]}, "kind": {"enum": [kind]}, "metadata": meta, "spec": spec}
    return {"definitions": {"pair": pair}, "type": "object", "properties": properties, "required": ["kind", "metadata"]}


def _config(r: Random, depth: int, hard: float, *, refs: float) -> Schema:
    schema = _object(r, depth, closed=0.4, nested=0.3, size=(2, 7))
    if r.random() < refs:
        node = _object(r, 0, size=(1, 3))
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/definitions/node"}}
        schema["definitions"] = {"node": node}
        schema["properties"]["tree"] = {"$ref": "#/definitions/node"}
    if r.random() < refs:
        schema["properties"]["either"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    if r.random() < refs:
        schema["properties"]["one"] = {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"path": {"type": "string"}}}]}
    if r.random() < refs / 2:
        schema["properties"]["by_name"] = {"type": "object", "patternProperties": {"^[a-z]+$": _scalar(r)}, "additionalProperties": False}
    if r.random() < refs / 2:
        schema["properties"]["both"] = {
            "allOf": [_object(r, 0, closed=0.0, size=(1, 2)), {"type": "object", "properties": {"extra": {"type": "boolean"}}}]
        }
    return _plant(r, {"$schema": "http://json-schema.org/draft-07/schema#", **schema}, hard)


MAKERS = {
    "functions": _functions,
    "calls": _calls,
    "mcp": _mcp,
    "events": _events,
    "kubernetes": _kubernetes,
    "mixed": lambda r: _object(r, 2),
    "config easy": lambda r: _config(r, 1, 0.04, refs=0.1),
    "config medium": lambda r: _config(r, 2, 0.12, refs=0.4),
    "config hard": lambda r: _config(r, 3, 0.32, refs=0.8),
    "store": lambda r: _config(r, 2, 0.6, refs=0.8),
}
