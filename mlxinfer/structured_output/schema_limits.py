"""Limits on clients' schemas, checked before compilation: those that would exceed llguidance's time or stack."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from .reference_chain import longest_chain
from .schema_parts import SchemaPart, Targets, refusal, schema_parts, steps_of

MOST_PROPERTIES = 2500
MOST_OPTIONAL = 1000
"""Maximum number of optional properties of an object; the compile time grows with its square."""
_MOST_OPTIONAL_SQUARED = 1_500_000
"""Maximum sum of the squares of optional properties over all objects."""
MOST_PATTERN_PROPERTIES = 50
"""Maximum number of name patterns of an object, because all pairs are compared."""
MOST_PATTERNS = 10
"""Maximum number of patterns that one text must match. A few more take seconds."""
LARGEST_DIVISOR = 10_000
"""Maximum of `multipleOf` without its decimal point, because each remainder is a state."""
MOST_DEFINITIONS = 2000
"""Maximum number of referenced definitions."""
LONGEST_CHAIN = 600
"""Maximum nesting of schemas, references included; each level uses stack."""


def check_limits(schema: Any) -> None:
    """Raise `SamplingError` with keyword and path for a schema beyond the limits.

    The schema may be nested 120 levels deep. Time and memory are linear in its length.
    """
    seen = list(schema_parts(schema))
    squared = 0
    patterns: dict[int, int] = {}
    for part in seen:
        squared += _check_object(part)
        _check_divisor(part)
        if isinstance(part.schema.get("allOf"), list):
            _check_patterns(part, patterns)
    if squared > _MOST_OPTIONAL_SQUARED:
        raise refusal("properties", None, "together there are too many that may be left out: require them, or split the schema")
    _check_references(seen)


def forced_size(schema: Any) -> int:
    """Return the number of bytes of forced texts, without names."""
    options = ([part.schema["const"]] if "const" in part.schema else _listed(part.schema, "enum") for part in schema_parts(schema))
    return sum(len(option[0].encode()) for option in options if len(option) == 1 and isinstance(option[0], str))


def _check_object(where: SchemaPart) -> int:
    """Check one object and return the square of its number of optional properties."""
    part, path = where.schema, where
    patterns = part.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) > MOST_PATTERN_PROPERTIES:
        raise refusal("patternProperties", path, f"there are {len(patterns)}, and {MOST_PATTERN_PROPERTIES} are allowed")
    count, optional = _properties(part)
    if count > MOST_PROPERTIES:
        raise refusal("properties", path, f"there are {count}, and {MOST_PROPERTIES} are allowed")
    if optional > MOST_OPTIONAL:
        raise refusal("properties", path, f"{optional} of them may be left out, and {MOST_OPTIONAL} are allowed: require the others")
    for keyword in ("anyOf", "oneOf"):
        together = sum(optional + _properties(each)[1] for each in _listed(part, keyword))
        if together > MOST_OPTIONAL:
            raise refusal(keyword, path, f"its parts have {together} properties that may be left out, and {MOST_OPTIONAL} are allowed")
    return optional**2


def _properties(part: Any) -> tuple[int, int]:
    """Return (number of properties, number of optional ones) of an object with its `allOf`."""
    if not isinstance(part, Mapping):
        return 0, 0
    objects = [part, *(each for each in _listed(part, "allOf") if isinstance(each, Mapping))]
    names = {name for each in objects if isinstance(each.get("properties"), Mapping) for name in each["properties"]}
    required = {name for each in objects for name in _listed(each, "required") if isinstance(name, str)}
    return len(names), len(names - required)


def _check_divisor(part: SchemaPart) -> None:
    divisor = part.schema.get("multipleOf")
    if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
        return
    exact = Decimal(repr(divisor))
    if not exact.is_finite() or abs(exact.scaleb(-min(int(exact.as_tuple().exponent), 0))) > LARGEST_DIVISOR:
        raise refusal(f"multipleOf {divisor}", part, f"up to {LARGEST_DIVISOR} are allowed")


def _check_patterns(part: SchemaPart, known: dict[int, int]) -> None:
    count = sum((_patterns(each, known) for each in part.schema["allOf"]), "pattern" in part.schema)
    if count > MOST_PATTERNS:
        raise refusal("allOf", part, f"it has {count} patterns, and {MOST_PATTERNS} are allowed")


def _patterns(schema: Any, known: dict[int, int]) -> int:
    """Return the number of patterns that a text must match to fit this part of an `allOf`; `known` caches parts by id."""
    if not isinstance(schema, Mapping):
        return 0
    if id(schema) not in known:
        alternatives = [max((_patterns(each, known) for each in _listed(schema, key)), default=0) for key in ("anyOf", "oneOf")]
        together = sum(_patterns(each, known) for each in _listed(schema, "allOf"))
        known[id(schema)] = ("pattern" in schema) + together + sum(alternatives)
    return known[id(schema)]


def _check_references(parts: list[SchemaPart]) -> None:
    """Check number, targets and nesting of references; a definition weighs its depth."""
    references: dict[str, set[str]] = {"": set()}
    tree = Targets()
    for target in {steps_of(part.schema["$ref"]) for part in parts if isinstance(part.schema.get("$ref"), str)} - {""}:
        references[target], node = set(), tree
        for step in target.split("\0"):
            node = node.setdefault(step, Targets())
        node.name = target
    if len(references) - 1 > MOST_DEFINITIONS:
        raise refusal("$ref", None, f"{len(references) - 1} definitions are referred to, and {MOST_DEFINITIONS} are allowed")
    depths = dict.fromkeys(references, 1)
    for part in parts:
        _find_owner(part, tree)
        depths[part.owner] = max(depths[part.owner], 1 + part.below)
        if isinstance(part.schema.get("$ref"), str):
            references[part.owner].add(steps_of(part.schema["$ref"]))
    reached = {part.targets.name for part in parts if part.targets is not None and part.targets.name is not None}
    for part in parts:
        reference = part.schema.get("$ref")
        if isinstance(reference, str) and steps_of(reference) not in reached | {""} and not _is_boolean(parts[0].schema, reference):
            raise refusal("$ref", part, f"no schema at {reference:.200}")
    levels, first = longest_chain(references, depths)
    if levels > LONGEST_CHAIN:
        place = SchemaPart({}, steps=tuple(first.split("\0")))
        raise refusal("$ref", place, f"references lead {levels} levels deep, and {LONGEST_CHAIN} are allowed")


def _find_owner(part: SchemaPart, tree: Targets) -> None:
    """Set the owner of a part from its `outside`, whose owner is set."""
    part.targets = tree
    if part.outside is not None:
        part.owner, part.below, part.targets = part.outside.owner, part.outside.below, part.outside.targets
    for step in part.steps:
        part.targets, part.below = None if part.targets is None else part.targets.get(step), part.below + 1
        if part.targets is not None and part.targets.name is not None:
            part.owner, part.below = part.targets.name, 0


def _is_boolean(schema: Any, reference: str) -> bool:
    """Return True if a reference points at true or false, which are also schemas."""
    for step in steps_of(reference).split("\0"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return isinstance(schema, bool)


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
