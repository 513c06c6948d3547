"""Schemas that nobody needs to hold an answer to, told before they are compiled: what would take llguidance too long, or its stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from ..errors import SamplingError
from ..structure import LISTED, NAMED
from .reference_chain import longest_chain

MOST_PROPERTIES = 2500
"""Properties of one object."""
MOST_OPTIONAL = 1000
"""Properties of one object that may be left out. All orders of leaving out are tried: time grows with the square."""
_MOST_OPTIONAL_SQUARED = 1_500_000
"""The sum of their squares over all objects."""
MOST_PATTERN_PROPERTIES = 50
"""Patterns of names in one object, each of which is compared with each other."""
MOST_PATTERNS = 10
"""Patterns that one text has to match at once. A few more take seconds."""
LARGEST_DIVISOR = 10_000
"""`multipleOf` up to here, read without its decimal point: there is a state for each remainder."""
MOST_DEFINITIONS = 2000
"""What references point at."""
LONGEST_CHAIN = 600
"""Levels of schemas that are read one inside the other, through references too: each takes a part of the stack."""


def check_limits(schema: Any) -> None:
    """Raises `SamplingError` that names keyword and place. The schema may be nested 120 levels deep."""
    seen: list[tuple[str, Mapping[str, Any]]] = list(_parts(schema, ""))
    squared = 0
    for path, part in seen:
        squared += _check_object(part, path)
        _check_divisor(part.get("multipleOf"), path)
        if isinstance(part.get("allOf"), list) and not path.rpartition(".")[2].startswith("allOf"):
            patterns = sum(map(_patterns, part["allOf"]), "pattern" in part)
            if patterns > MOST_PATTERNS:
                raise _refusal("allOf", path, f"it has {patterns} patterns, and {MOST_PATTERNS} are allowed")
    if squared > _MOST_OPTIONAL_SQUARED:
        raise _refusal("properties", "", "together there are too many that may be left out: require them, or split the schema")
    _check_references(schema, seen)


def forced_size(schema: Any) -> int:
    """Bytes of the texts that an answer has no choice about, next to names."""
    options = ([part["const"]] if "const" in part else _listed(part, "enum") for _, part in _parts(schema, ""))
    return sum(len(option[0].encode()) for option in options if len(option) == 1 and isinstance(option[0], str))


def _check_object(part: Mapping[str, Any], path: str) -> int:
    """The square of the number of properties that may be left out."""
    patterns = part.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) > MOST_PATTERN_PROPERTIES:
        raise _refusal("patternProperties", path, f"there are {len(patterns)}, and {MOST_PATTERN_PROPERTIES} are allowed")
    count, optional = _properties(part)
    if count > MOST_PROPERTIES:
        raise _refusal("properties", path, f"there are {count}, and {MOST_PROPERTIES} are allowed")
    if optional > MOST_OPTIONAL:
        raise _refusal("properties", path, f"{optional} of them may be left out, and {MOST_OPTIONAL} are allowed: require the others")
    for keyword in ("anyOf", "oneOf"):
        together = sum(optional + _properties(each)[1] for each in _listed(part, keyword))
        if together > MOST_OPTIONAL:
            raise _refusal(keyword, path, f"its parts have {together} properties that may be left out, and {MOST_OPTIONAL} are allowed")
    return optional**2


def _properties(part: Any) -> tuple[int, int]:
    """Properties of an object with those of its `allOf`, and how many of them may be left out."""
    if not isinstance(part, Mapping):
        return 0, 0
    objects = [part, *(each for each in _listed(part, "allOf") if isinstance(each, Mapping))]
    names = {name for each in objects if isinstance(each.get("properties"), Mapping) for name in each["properties"]}
    required = {name for each in objects for name in _listed(each, "required") if isinstance(name, str)}
    return len(names), len(names - required)


def _check_divisor(divisor: Any, path: str) -> None:
    if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
        return
    exact = Decimal(repr(divisor))
    if not exact.is_finite() or abs(exact.scaleb(-min(int(exact.as_tuple().exponent), 0))) > LARGEST_DIVISOR:
        raise _refusal(f"multipleOf {divisor}", path, f"up to {LARGEST_DIVISOR} are allowed")


def _patterns(schema: Any, depth: int = 0) -> int:
    """Patterns that a text has to match which fits this part of an `allOf`."""
    if not isinstance(schema, Mapping):
        return 0
    alternatives = [max(map(_patterns, _listed(schema, key)), default=0) for key in ("anyOf", "oneOf")]
    return ("pattern" in schema) + sum(map(_patterns, _listed(schema, "allOf"))) + sum(alternatives)


def _check_references(schema: Any, parts: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Each definition is as heavy as it is deep, and leads to those that it refers to."""
    references: dict[str, set[str]] = {"": set()}
    depths: dict[str, int] = {"": 1}
    targets = sorted({_place(part["$ref"]) for _, part in parts if isinstance(part.get("$ref"), str)} - {""}, key=len, reverse=True)
    for target in targets:
        references[target], depths[target] = set(), 1
    if len(targets) > MOST_DEFINITIONS:
        raise _refusal("$ref", "", f"{len(targets)} definitions are referred to, and {MOST_DEFINITIONS} are allowed")
    known = frozenset(targets)
    for path, part in parts:
        owner = _owner(path, known)
        depths[owner] = max(depths[owner], 1 + path.count("\0") - owner.count("\0"))
        if isinstance(part.get("$ref"), str):
            references[owner].add(_place(part["$ref"]))
    levels, first = longest_chain(references, depths)
    if levels > LONGEST_CHAIN:
        raise _refusal("$ref", first, f"references lead {levels} levels deep, and {LONGEST_CHAIN} are allowed")


def _owner(path: str, targets: frozenset[str]) -> str:
    """The innermost definition that a part is in."""
    while path and path not in targets:
        path = path.rpartition("\0")[0]
    return path


def _place(reference: str) -> str:
    return "".join(f"\0{each.replace('~1', '/').replace('~0', '~')}" for each in reference.lstrip("#").split("/")[1:])


def _parts(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All schemas of a schema with their places, whose steps are separated by a zero character."""
    waiting = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        yield path, schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, Mapping):
                waiting += [(f"{path}\0{key}\0{name}", each) for name, each in value.items()]
            elif isinstance(value, list):
                waiting += [(f"{path}\0{key}\0{number}", each) for number, each in enumerate(value)] if key in LISTED else []
            elif isinstance(value, Mapping) and key not in ("const", "default", "enum", "examples"):
                waiting.append((f"{path}\0{key}", value))


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _refusal(keyword: str, path: str, why: str) -> SamplingError:
    place = path.strip("\0").replace("\0", ".")
    return SamplingError(f"structure: the schema cannot be held{f' at {place}' if place else ''}: {keyword}: {why}")
