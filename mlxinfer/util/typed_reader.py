"""Typed reader of a foreign mapping: a config or the metadata of a GGUF file.

The reader records the keys that were read. A caller can then refuse the rest, which may change the result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import MLXInferError

LARGEST = 2**31 - 1
"""Default upper bound of whole numbers."""


class TypedReader(ABC):
    """Reader of typed values. A missing key returns the default or raises without one; only `optional_` methods accept null."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._taken: set[str] = set()

    @abstractmethod
    def error(self, key: str, what: str) -> MLXInferError:
        """Return the exception for a key: `what` is wrong, in which file, and the remedy."""

    def bad(self, key: str, value: object, wanted: str) -> MLXInferError:
        return self.error(key, f"is {shown(value)}, must be {wanted}")

    def has(self, key: str) -> bool:
        return key in self.values

    def take(self, key: str, default: Any = None) -> Any:
        """Return the raw value and mark the key as read."""
        self._taken.add(key)
        return self.values.get(key, default)

    def untaken(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys that were not read, with their values."""
        return ((key, value) for key, value in self.values.items() if key not in self._taken)

    def integer(self, key: str, default: int | None = None, *, low: float = 1, high: float = LARGEST) -> int:
        value = self.optional_integer(key, default, low=low, high=high)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def optional_integer(self, key: str, default: int | None = None, *, low: float = 1, high: float = LARGEST) -> int | None:
        """Return a whole number; 2.0 counts as one."""
        value = self.take(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and low <= value <= high):
            return value
        raise self.bad(key, value, f"a whole number of at least {low}" + (f" and at most {high}" if high < math.inf else ""))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key, default)
        if value is None:
            raise self.bad(key, value, "a number") if self.has(key) else self.error(key, "is missing")
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        value = self.take(key, default)
        if value is not None and not is_number(value):
            raise self.bad(key, value, "a finite number")
        return None if value is None else float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.bad(key, value, "above 0")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.optional_text(key, default)
        if value is None:
            raise self.bad(key, value, "a string")
        return value

    def optional_text(self, key: str, default: str | None = None) -> str | None:
        value = self.take(key, default)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value


def is_number(value: object) -> bool:
    """Return True for a finite number that is not a bool."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)


def shown(value: object) -> str:
    """Return a value as a short single line for messages."""
    return " ".join(repr(value)[:60].split())
