"""Control tokens belong to the chat template: where people or documents write one into a message, it is text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any


class ControlTokens:
    """`tokens`: the special tokens as a text would spell them. Safe to share between threads."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def broken(self, value: Any) -> tuple[Any, str]:
        """A copy of messages or tools in which a mark stands inside every control token, and the mark. It is to be taken out of the prompt
        again by cutting it there, and encoding the parts one by one. Without control tokens: the value itself, and no mark."""
        if self._any is None or not _has(value, self._any):
            return value, ""
        mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"  # nobody can have written it, and nothing in Unicode turns into it

        def cut(found: re.Match[str]) -> str:
            return f"{found[0][0]}{mark}{found[0][1:]}"

        return _mapped(value, self._any, cut), mark


def _has(value: Any, pattern: re.Pattern[str], depth: int = 0) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        return any(_has(part, pattern, depth + 1) for pair in value.items() for part in pair)
    return isinstance(value, (list, tuple)) and any(_has(part, pattern, depth + 1) for part in value)


def _mapped(value: Any, pattern: re.Pattern[str], cut: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return pattern.sub(cut, value)
    if depth > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return {_mapped(key, pattern, cut, depth + 1): _mapped(item, pattern, cut, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(part, pattern, cut, depth + 1) for part in value]
    return value


_DEEPEST = 120
"""Templates take less, and say so."""
