"""The patterns that PEFT's configs have for names of modules, matched without running long: they come with somebody's file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AdapterError

Value = TypeVar("Value")

_PLAIN = re.compile(r"[\w.\-]+")
_LONGEST = 256
_REPEATED_GROUP = re.compile(r"\)\s*[*+{?]")
_MOST_REPEATS = 3


def value_for(module: str, patterns: Mapping[str, Value], otherwise: Value, path: Path) -> Value:
    """The value of the first pattern that a module's name ends with, as PEFT looks it up. Raises `AdapterError` for a pattern that might
    take for ever."""
    return next((value for pattern, value in patterns.items() if _ends_with(module, pattern, path)), otherwise)


def is_target(module: str, targets: Any) -> bool:
    """Whether a list of names has a module's. A single expression is not looked into: the tensors say what it has matched."""
    if not isinstance(targets, list):
        return True
    return any(module == target or module.endswith(f".{target}") for target in targets if isinstance(target, str))


def _ends_with(module: str, pattern: str, path: Path) -> bool:
    bare = pattern.removeprefix("^")
    if _PLAIN.fullmatch(bare):
        return module == bare or (bare is pattern and module.endswith(f".{bare}"))
    repeats = sum(bare.count(mark) for mark in "*+{")
    if len(bare) > _LONGEST or repeats > _MOST_REPEATS or _REPEATED_GROUP.search(bare):
        raise AdapterError(f"{path}: the pattern {pattern[:60]!r} of adapter_config.json is too intricate: write the names of its modules")
    try:
        start = "" if pattern.startswith("^") else r"(.*\.)?"
        return re.fullmatch(f"{start}({bare})", module) is not None
    except re.error as error:
        raise AdapterError(f"{path}: adapter_config.json has a pattern that is no regular expression: {pattern[:60]!r} ({error})") from None
