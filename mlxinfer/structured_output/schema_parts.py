"""The schemas that a JSON Schema is made of, with their places, and its references, all of which are made pointers to such places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

from ..errors import SamplingError
from ..structure import LISTED, MAX_GRAMMAR_BYTES, NAMED
from ..util.dataclass import dataclass

DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are not schemas."""
_LONGEST_STEP = 80
"""Characters of a name in a message."""


@dataclass(slots=True)
class Part:
    """A schema in a schema. Its place is known by the part around it: written out for each part, long names would fill the memory."""

    schema: Mapping[str, Any]
    """The part itself."""
    outside: Part | None = None
    """The part around it."""
    steps: tuple[str, ...] = ()
    """Keyword, and name or number below it, that lead here from `outside`."""
    owner: str = ""
    """The innermost definition that it is in: what a reference points at."""
    below: int = 0
    """Steps from there."""
    targets: Targets | None = None
    """Definitions inside it."""

    def steps_from_root(self) -> list[str]:
        """All steps that lead here."""
        steps: list[str] = []
        part: Part | None = self
        while part is not None:
            steps[:0] = part.steps
            part = part.outside
        return steps

    @property
    def path(self) -> str:
        """For people: the first steps, and of long names the first characters."""
        return ".".join(step if len(step) <= _LONGEST_STEP else f"{step[:_LONGEST_STEP]}..." for step in self.steps_from_root())


class Targets(dict[str, "Targets"]):
    """Targets of references, as a tree of steps."""

    name: str | None = None
    """Result of `steps_of` for a reference that points here."""


def schema_parts(schema: Any) -> Iterator[Part]:
    """All schemas of a schema, each after the one around it."""
    waiting = [Part(schema)] if isinstance(schema, Mapping) else []
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
                waiting.append(Part(value, part, (key,)))
            waiting += [Part(each, part, (key, name)) for name, each in below if isinstance(each, Mapping)]


def use_pointers(schema: Mapping[str, Any]) -> None:
    """Change the references of a schema, in place, to pointers from the whole of it, and drop the names that they used.

    These are `$id`, `$anchor` and the older `id`. Raises `SamplingError` for a reference to what is not there."""
    parts = list(schema_parts(schema))
    if not any(isinstance(part.schema.get("$ref"), str) for part in parts):
        return
    names, left = _Names(parts), MAX_GRAMMAR_BYTES
    for part in parts:
        reference = part.schema.get("$ref")
        if isinstance(reference, str):
            pointer = names.pointer(part, reference)
            left -= max(0, len(pointer) - len(reference))
            if left < 0:
                raise refusal("$ref", part, "the references are too long written as pointers: use shorter names")
            part.schema["$ref"] = pointer  # type: ignore[index]


class _Names:
    """The names that a schema gives to its parts."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._address = ""
        self._parts: dict[str, Part] = {}
        self._own: set[int] = set()
        """Parts with an address of their own, from which the pointers inside them start."""
        for part in parts:
            for key in ("$id", "id", "$anchor"):
                if isinstance(part.schema.get(key), str):
                    self._take(part, key, part.schema.pop(key))  # type: ignore[attr-defined]

    def _take(self, part: Part, key: str, name: str) -> None:
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

    def pointer(self, part: Part, reference: str) -> str:
        """The pointer for a reference of a part. Raises `SamplingError`."""
        address, _, fragment = reference.partition("#")
        outside: Part | None = part
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
    """The steps of a JSON pointer, separated by zero characters; empty for the whole schema."""
    return "\0".join(each.replace("~1", "/").replace("~0", "~") for each in unquote(reference.lstrip("#")).split("/")[1:])


def refusal(keyword: str, part: Part | None, why: str) -> SamplingError:
    place = "" if part is None else part.path
    return SamplingError(f"structure: the schema cannot be held{f' at {place}' if place else ''}: {keyword}: {why}")
