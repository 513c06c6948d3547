"""A model's chat templates: which one applies, and what it is given."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import TemplateError
from .backend import DEFAULT_TEMPLATE, TOOL_TEMPLATE

if TYPE_CHECKING:
    from .template_sandbox import Renderer


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


class ChatTemplates:
    """`sources` by name ("default", "tool_use", ...); templates see `special_tokens` as variables ("bos_token", ...)."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Renderer] = {}
        self._lock = Lock()

    @property
    def default(self) -> str | None:
        return self._sources.get(DEFAULT_TEMPLATE)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """Raises `TemplateError`."""
        renderer = self._renderer(TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._sources else DEFAULT_TEMPLATE)
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise TemplateError("messages must be a list of mappings with 'role' and 'content'")
        given = {"messages": list(messages), "tools": list(tools) if tools else None, "documents": None, **variables}
        return renderer({**self._special_tokens, **_plain(given)})

    def _renderer(self, name: str) -> Renderer:
        if name not in self._sources:
            others = f" of that name, only {', '.join(map(repr, self._sources))}" if self._sources else ""
            raise TemplateError(f"the model has no chat template{others}: use a text prompt, or put a chat_template.jinja beside the model")
        # jinja2 takes as long to import as all of this package: not before there is something to render.
        from .template_sandbox import compile_template

        with self._lock:
            if name not in self._compiled:
                self._compiled[name] = compile_template(self._sources[name])
            return self._compiled[name]


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of plain values only: whatever else has methods that a template could call."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth > 100:
        raise TemplateError("messages and tools are nested too deeply")
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    raise TemplateError(f"messages and tools must be made of text, numbers, lists and mappings, not {type(value).__name__}")
