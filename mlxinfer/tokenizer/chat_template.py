"""Chat templates of a model: selection, variables and rendering."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import TemplateError
from .backend import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from .search import TokenSearch

if TYPE_CHECKING:
    from .template_sandbox import Renderer


class SpecialTokens:
    """Special tokens of a vocabulary, searched in the text of messages. Thread-safe."""

    def __init__(self, tokens: Iterable[str], also: Iterable[str] = ()) -> None:
        """Create a search; `also` are further tokens, used in tool calls, that user messages must not spell."""
        special = {token for token in tokens if len(token) > 1}
        self._everywhere = TokenSearch(special)
        self._but_in_answers = TokenSearch(special.union(token for token in also if len(token) > 1))

    def escape_special_tokens(self, value: Any) -> tuple[Any, str]:
        """Return a copy of messages or tools with a mark inside each spelled special token, and the mark.

        Encode the prompt with `encode_marked`; spelled special tokens are then plain text. Returns the value itself and "" if there are
        none.
        """
        mark = f"\ufdd0{os.urandom(8).hex()}\ufdd1"  # noncharacters: random, and no normalization produces them
        escaped, found = self._escaped(value, mark, self._but_in_answers, 0)
        return (escaped, mark) if found else (value, "")

    def _escaped(self, value: Any, mark: str, search: TokenSearch, depth: int) -> tuple[Any, bool]:
        """Return (copy, True if a text was escaped)."""
        if isinstance(value, str):
            text = _escaped_text(value, mark, search)
            return text, text != value
        if depth > _DEEPEST or not isinstance(value, (Mapping, list, tuple)):
            return value, False
        if depth == _MESSAGE and isinstance(value, Mapping) and value.get("role") == "assistant":
            search = self._everywhere
        parts = [part for pair in value.items() for part in pair] if isinstance(value, Mapping) else value
        escaped = [self._escaped(part, mark, search, depth + 1) for part in parts]
        copies, found = [copy for copy, _ in escaped], any(inner for _, inner in escaped)
        return dict(zip(copies[::2], copies[1::2], strict=True)) if isinstance(value, Mapping) else copies, found


def _escaped_text(text: str, mark: str, search: TokenSearch) -> str:
    pieces, done = [], 0
    for begin, end in search.find(text):
        pieces += [text[done : begin + 1], mark, text[begin + 1 : end]]
        done = end
    return "".join([*pieces, text[done:]])


_MESSAGE = 2
"""Nesting level of messages."""
_DEEPEST = 120
"""Maximum nesting that is searched; templates refuse values below that with their own error."""
_PROBE = "probe7391"
"""Text of the message that shows which form of content a template renders."""


class ChatTemplates:
    """Chat templates by name ("default", "tool_use", ...), compiled at first use. Thread-safe.

    Templates receive `special_tokens` as variables ("bos_token", ...).
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Renderer] = {}
        self._variables: frozenset[str] | None = None
        self._lists_only: dict[str, bool] = {}
        self._lock = Lock()

    @property
    def default(self) -> str | None:
        """Source of the default template; None without one."""
        return self._sources.get(DEFAULT_TEMPLATE)

    @property
    def variables(self) -> frozenset[str]:
        """Variables that at least one template reads. Raises `TemplateError`."""
        if self._variables is None:
            from .template_sandbox import mentioned_variables  # lazy: imports jinja2

            self._variables = frozenset().union(*map(mentioned_variables, self._sources.values()))
        return self._variables

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """Return the prompt text. With tools, the template "tool_use" is preferred. Raises `TemplateError`.

        Texts become lists of one part for a template that would lose them (SmolVLM).
        """
        name = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._sources else DEFAULT_TEMPLATE
        self._renderer(name)
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise TemplateError("messages must be a list of mappings with 'role' and 'content'")
        if self._loses_texts(name):
            messages = [_with_parts(message) for message in messages]
        return self._rendered(name, messages, {"tools": list(tools) if tools else None, **variables})

    def _rendered(self, name: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        given = {"messages": list(messages), "documents": None, **variables}
        return self._renderer(name)({**self._special_tokens, **_plain_values(given)})

    def _loses_texts(self, name: str) -> bool:
        """Return True if a message survives as a list of parts and not as text. Both are rendered once."""
        if name not in self._lists_only:
            self._lists_only[name] = not self._shows(name, _PROBE) and self._shows(name, _parts(_PROBE))
        return self._lists_only[name]

    def _shows(self, name: str, content: str | list[dict[str, str]]) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = self._rendered(name, messages, {"tools": None, "add_generation_prompt": True})
        except TemplateError:
            return False
        return _PROBE in text and "'type'" not in text  # not a list as Python writes it

    def _renderer(self, name: str) -> Renderer:
        if name not in self._sources:
            others = f" of that name, only {', '.join(map(repr, self._sources))}" if self._sources else ""
            raise TemplateError(f"the model has no chat template{others}: use a text prompt, or put a chat_template.jinja beside the model")
        # Lazy: jinja2 takes as long to import as this whole package.
        from .template_sandbox import compile_template

        with self._lock:
            if name not in self._compiled:
                self._compiled[name] = compile_template(self._sources[name])
            return self._compiled[name]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": _parts(content or "")} if content is None or isinstance(content, str) else message


def sorted_keys(value: Any, depth: int = 0) -> Any:
    """Return a copy with sorted keys at all levels."""
    if depth > _DEEPEST:
        raise TemplateError("messages and tools are nested too deeply")
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key], depth + 1) for key in sorted(value, key=str)}
    return [sorted_keys(item, depth + 1) for item in value] if isinstance(value, (list, tuple)) else value


def _plain_values(value: Any, depth: int = 0) -> Any:
    """Return a copy of plain values only, because a template could call the methods of other objects."""
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
        return {_plain_values(key, depth + 1): _plain_values(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_values(item, depth + 1) for item in value]
    raise TemplateError(f"messages and tools must be made of text, numbers, lists and mappings, not {type(value).__name__}")
