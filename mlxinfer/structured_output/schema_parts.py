"""Subschemas of a JSON Schema with their paths, and its references as JSON pointers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

from ..errors import SamplingError
from ..structure import LISTED, MAX_GRAMMAR_BYTES, NAMED
from ..util.dataclass import dataclass

DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords with data instead of schemas."""
_LONGEST_STEP = 80
"""Maximum characters of a name in a message."""


@dataclass(slots=True)
class SchemaPart:
    """A subschema. Its path is stored relative to the part around it, because full paths of long names would fill the memory."""

    schema: Mapping[str, Any]
    outside: SchemaPart | None = None
    """The enclosing part."""
    steps: tuple[str, ...] = ()
    """Keyword and, if present, name or number below it, from `outside` to here."""
    owner: str = ""
    """The innermost enclosing target of a reference."""
    below: int = 0
    """Number of steps from `owner`."""
    targets: Targets | None = None
    """Targets of references inside of it."""

    def steps_from_root(self) -> list[str]:
        """Return all steps from the root."""
        steps: list[str] = []
        part: SchemaPart | None = self
        while part is not None:
            steps[:0] = part.steps
            part = part.outside
        return steps

    @property
    def path(self) -> str:
        """Dotted path for messages, with long names shortened."""
        return ".".join(step if len(step) <= _LONGEST_STEP else f"{step[:_LONGEST_STEP]}..." for step in self.steps_from_root())


class Targets(dict[str, "Targets"]):
    """Targets of references, as a tree of steps."""

    name: str | None = None
    """Result of `steps_of` for a reference that points here."""


def schema_parts(schema: Any) -> Iterator[SchemaPart]:
    """Yield all subschemas, each after its enclosing one."""
    waiting = [SchemaPart(schema)] if isinstance(schema, Mapping) else []
    while waiting:
        part = waiting.pop()
        yield part
        for key, value in part.schema.items():
            below: Iterable[tuple[str, Any]] = ()
            if key in NAMED and isinstance(value, Mapping):
                below = value.items()
            elif isinstance(value, list):
                below = ((str(number), each) for number, each in enumerate(value)) if key in LISTED else ()
            elif isinstance(value, Mapping) and key not in DATA:
                waiting.append(SchemaPart(value, part, (key,)))
            waiting += [SchemaPart(each, part, (key, name)) for name, each in below if isinstance(each, Mapping)]


def use_pointers(schema: Mapping[str, Any]) -> None:
    """Replace the references of a schema, in place, by JSON pointers from its root, and drop `$id`, `$anchor` and the older `id`.

    Raises `SamplingError` for a reference without a target.
    """
    parts = list(schema_parts(schema))
    if not any(isinstance(part.schema.get("$ref"), str) for part in parts):
        return
    names, left = _SchemaNames(parts), MAX_GRAMMAR_BYTES
    for part in parts:
        reference = part.schema.get("$ref")
        if isinstance(reference, str):
            pointer = names.pointer(part, reference)
            left -= max(0, len(pointer) - len(reference))
            if left < 0:
                raise refusal("$ref", part, "the references are too long written as pointers: use shorter names")
            part.schema["$ref"] = pointer  # type: ignore[index]


class _SchemaNames:
    """Names of subschemas."""

    def __init__(self, parts: Iterable[SchemaPart]) -> None:
        self._address = ""
        self._parts: dict[str, SchemaPart] = {}
        self._own: set[int] = set()
        """Ids of parts with a base URI, from which the pointers inside them start."""
        for part in parts:
            for key in ("$id", "id", "$anchor"):
                if isinstance(part.schema.get(key), str):
                    self._take(part, key, part.schema.pop(key))  # type: ignore[attr-defined]

    def _take(self, part: SchemaPart, key: str, name: str) -> None:
        if key == "$anchor" or name.startswith("#"):
            self._parts.setdefault(f"#{name.lstrip('#')}", part)
            return
        name = name.rstrip("#")
        if part.outside is None:
            self._address = name
        else:
            self._own.add(id(part))
        for each in (name, urljoin(self._address, name)):
            self._parts.setdefault(each, part)

    def pointer(self, part: SchemaPart, reference: str) -> str:
        """Return the pointer for a reference of a part. Raises `SamplingError`."""
        address, _, fragment = reference.partition("#")
        outside: SchemaPart | None = part
        if address:
            outside = self._parts.get(address) or self._parts.get(urljoin(self._address, address))
        elif fragment and not fragment.startswith("/"):
            outside, fragment = self._parts.get(f"#{fragment}"), ""
        else:
            while outside is not None and outside.outside is not None and id(outside) not in self._own:
                outside = outside.outside
        if outside is None or (fragment and not fragment.startswith("/")):
            raise refusal("$ref", part, f"{reference:.200} is not in the schema: write a pointer such as #/$defs/name")
        steps = (quote(step.replace("~", "~0").replace("/", "~1"), safe="~$") for step in outside.steps_from_root())
        return "".join(["#", *(f"/{step}" for step in steps), fragment])


def steps_of(reference: str) -> str:
    """Return the steps of a JSON pointer, separated by zero characters; "" for the root."""
    return "\0".join(each.replace("~1", "/").replace("~0", "~") for each in unquote(reference.lstrip("#")).split("/")[1:])


def refusal(keyword: str, part: SchemaPart | None, why: str) -> SamplingError:
    place = "" if part is None else part.path
    return SamplingError(f"structure: the schema cannot be held{f' at {place}' if place else ''}: {keyword}: {why}")
