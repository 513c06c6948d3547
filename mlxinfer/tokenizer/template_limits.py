"""How much a chat template may do: steps, text and time, counted while it renders.

A template comes with a model, so it is untrusted. Loops and calls cost a step each; making a text or a container costs its size,
checked before anything large is made. All of it works in any thread, since nothing is interrupted from outside.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from ..errors import TemplateError

MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
MAX_SIZE = 16_000_000
"""Characters of one text. A container weighs its contents, and `_ELEMENT` more for each."""
MAX_COUNT = 100_000
"""Numbers of a range, lines of a batch."""
_ELEMENT = 32
_CHARACTERS_PER_STEP = 256
_MAX_INT_BITS = 16_384
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4,})|\d{5,}")

_current: ContextVar[Budget] = ContextVar("template_budget")


class Budget:
    """What is left to one rendering of these variables; a context manager, inside which templates run."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS
        self._input_sizes: dict[int, int] = {}
        for value in variables.values():
            self._measure_input(value)

    def __enter__(self) -> Budget:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def spend(self, characters: int) -> None:
        self._steps -= 1 + characters // _CHARACTERS_PER_STEP
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateError("the chat template runs too long: it loops over too much")

    def weigh(self, value: Any) -> int:
        """Size of a value once written out, shared parts counted each time; stops counting beyond `MAX_SIZE`."""
        size = 0
        pending = [value]
        while pending and size <= MAX_SIZE:
            item = pending.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, int):
                size += item.bit_length() // 3
            elif type(item) in (list, tuple, dict):
                known = self._input_sizes.get(id(item))
                size += _ELEMENT * len(item) if known is None else known
                if known is None:
                    pending.extend(item)
                    pending.extend(item.values() if type(item) is dict else ())
        return size

    def _measure_input(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return 1
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        size = _ELEMENT * len(value) + sum(map(self._measure_input, parts))
        self._input_sizes[id(value)] = size
        return size


def spend(characters: int = 0) -> None:
    """Pay for one step, and for this much text. Raises `TemplateError` when there is nothing left."""
    _current.get().spend(characters)


def allow(size: int) -> None:
    """Pay for a text or container before it is made. Raises `TemplateError` where it would be too large."""
    if size > MAX_SIZE:
        raise TemplateError("the chat template makes a text or a list that is too large")
    spend(size)


def weigh(value: Any) -> int:
    return _current.get().weigh(value)


def weighed(value: Any) -> Any:
    """The value itself, paid for."""
    allow(weigh(value))
    return value


def seen(value: Any) -> Any:
    """The value itself, paid for as something that is gone through once."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, (list, tuple, dict, range)):
        spend(_ELEMENT * len(value))
    return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result is out of proportion to what it is given."""
    if operator == "%" and isinstance(left, str):
        check_format(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INT_BITS:
            raise TemplateError("the chat template makes a number that is too large")
    elif operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(times, int):
                allow(weigh(repeated) * max(times, 0))


def check_format(pattern: str, values: Any = None) -> None:
    """Refuse a printf-style format with very wide fields, or one that names the same values over and over."""
    if _WIDE_FIELD.search(pattern):
        raise TemplateError("the chat template formats a field that is too wide")
    allow(len(pattern) + weigh(values) * (pattern.count("%") if isinstance(values, dict) else 1))


def check_count(value: Any, limit: int = MAX_COUNT) -> None:
    if isinstance(value, int) and value > limit:
        raise TemplateError(f"the chat template asks for {value} of something, more than {limit}")
