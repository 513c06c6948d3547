"""Paths at which there is nothing: what was probably meant, and how the log may show them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_ALIKE = 0.85
"""How alike a misspelled path has to be to a known one, from 0 to 1."""


class KnownPaths:
    """The paths of all endpoints."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._known = {path: _parts(path) for path in paths if "{" not in path and path != "/"}
        self._words = frozenset(part for parts in self._known.values() for part in parts)

    def near(self, path: str) -> str | None:
        """The endpoint that a client with a wrong base URL means: the one that ends in the most of the same parts, as in
        `/chat/completions` and `/v1/v1/chat/completions`; else one that is spelled nearly the same."""
        parts = _parts(path)
        found = max(self._known, key=lambda known: (_common_end(self._known[known], parts), -len(known)), default="")
        if found and _common_end(self._known[found], parts):
            return found
        return next(iter(get_close_matches("/" + "/".join(parts), self._known, 1, _ALIKE)), None)

    def shown(self, path: str) -> str:
        """The path with an asterisk for every part that is no word of an endpoint's: those may be anything, a text or a key."""
        return "/" + "/".join(part if part in self._words or not part else "*" for part in path[1:].split("/"))[:200]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _common_end(one: list[str], other: list[str]) -> int:
    """How many parts are the same at the end of both."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count
