"""Reads calls written as plain JSON, bare or in a code block, for models of any format.

Models that were trained on several forms fall back to this one, Qwen2.5-Coder always. Accepted are lines of
`{"name": "get", "arguments": {...}}`, a list of them, and both inside a code block or tags such as `<tools>`. llama.cpp and Ollama
read the same forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ..tools import Tools
from .call_reader import CallReader, Emit, ObjectCallReader, as_object
from .format import CallFormat, EventKind
from .streaming_json import ValueReader
from .streaming_match import skip_whitespace

FENCE = "```"
_TAGS = "tool_calls?|tools?|function_calls?|functions?|response|json|JSON|xml"
_OPENING = re.compile(rf"(`{{3,}}[ \t]*[\w+.-]{{0,24}}\s{{0,64}})?(?:<({_TAGS})>\s{{0,64}})?(\[\s{{0,64}})?(?=\{{)")
_MAY_OPEN = re.compile(
    r"`{1,2}|(?:`{3,}[ \t]*[\w+.-]{0,24}\s{0,64})?(?:<\w{0,14}|(?:<\w{1,14}>\s{0,64})?(?:\[\s{0,64})?)?",
)
FIRST = "{[<`"
"""Characters that may start a call as plain JSON."""
_ENDS_NO_CALL = frozenset("]},:;")
"""Characters that follow an object inside of other JSON or code."""


class BareCallsReader(CallReader):
    """Reads one run of calls from its first character.

    Nothing is emitted before the whole run is read, because text that only looks like calls must be returned as text. Each object must have
    the name of an offered tool, its arguments as an object, and nothing else but an id.
    """

    def __init__(self, calls: CallFormat, tools: Tools, emit: Emit, most: int | None = None) -> None:
        """Create a reader that delivers the first `most` calls; None delivers all."""
        super().__init__(calls, tools, emit)
        self._most = most
        self._events: list[tuple[EventKind, str]] = []
        self._object: _WholeObject | None = None
        self._fence, self._tag, self._list = False, "", False
        self._step: Callable[[str, int, bool], int | None] = self._open

    def read(self, text: str, at: int, final: bool) -> int:
        while not self.ended and not self.failed:
            after = self._step(text, at, final)
            if after is None:
                if final:
                    self.failed = True
                break
            at = after
        return at

    def rest(self, text: str) -> None:
        """Do nothing: no text is held back once `begun`."""

    def _open(self, text: str, at: int, final: bool) -> int | None:
        """Read an optional fence, tag and bracket before an object. None if more text is needed."""
        found = _OPENING.match(text, at)
        if found is None:
            return None if _MAY_OPEN.fullmatch(text, at) else self._fail(at)
        self._fence, self._tag, self._list = self._fence or bool(found[1]), found[2] or "", bool(found[3])
        return self._begin_object(found.end())

    def _begin_object(self, at: int) -> int:
        self._object = _WholeObject(self.calls, self.tools, lambda kind, piece: self._events.append((kind, piece)))
        self._step = self._in_object
        return at + 1

    def _in_object(self, text: str, at: int, final: bool) -> int | None:
        assert self._object is not None
        after = self._object.read(text, at, final)
        if self._object.failed:
            return self._fail(after)
        if self._object.ended:
            self._step = self._after_object
        return after if self._object.ended or after > at else None

    def _after_object(self, text: str, at: int, final: bool) -> int | None:
        """Read the text after a complete object: another object, the end of the list or block, or other text."""
        next_at = skip_whitespace(text, at)
        rest = text[next_at : next_at + 24]
        if not rest:
            return self._deliver(at) if final else None
        if rest[0] == "," or (rest[0] == ";" and not self._list):
            self._step = self._next_object
            return next_at + 1
        if self._list:
            self._list = rest[0] != "]"
            return self._fail(at) if self._list else next_at + 1
        if rest[0] == "{" and (self._fence or self._tag or "\n" not in text[at:next_at]):
            return self._begin_object(next_at)
        if self._tag and rest[0] == "<":
            return self._closing_tag(rest, next_at, final)
        if self._fence and not self._tag:
            return self._closing_fence(rest, next_at, final)
        bare = not self._tag and "\n" in text[at:next_at] and rest[0] not in _ENDS_NO_CALL
        return self._deliver(at) if bare else self._fail(at)

    def _next_object(self, text: str, at: int, final: bool) -> int | None:
        at = skip_whitespace(text, at)
        if at == len(text):
            return None
        return self._begin_object(at) if text[at] == "{" else self._fail(at)

    def _closing_tag(self, rest: str, at: int, final: bool) -> int | None:
        closing = f"</{self._tag}>"
        if rest.startswith(closing):
            self._tag = ""
            if not self._fence:
                return self._deliver(at + len(closing))
            return at + len(closing)
        return None if not final and closing.startswith(rest) else self._fail(at)

    def _closing_fence(self, rest: str, at: int, final: bool) -> int | None:
        """Read the end of the code block, or another tag in it."""
        if rest.startswith(FENCE):
            return self._deliver(at + len(rest) - len(rest.lstrip("`")))
        if FENCE.startswith(rest):
            return self._deliver(at) if final else None
        self._step = self._open
        return at if rest[0] in "<[" else self._fail(at)

    def _deliver(self, at: int) -> int:
        """Emit the calls of a complete run."""
        self.begun = self.ended = True
        count = 0
        for kind, piece in self._events:
            count += kind == "call_begin"
            if self._most is None or count <= self._most:
                self._emit(kind, piece)
        return at


class _WholeObject(ObjectCallReader):
    """Reads one call's object to its closing brace."""

    def _begin_value(self, key: str, first: str) -> None:
        self._key, self._value, self._json = key, ValueReader(), []

    def _take(self, found: str) -> None:
        if self._key == self.calls.arguments_key:
            self._arguments = as_object(found)
            self.failed = not self._arguments
        elif self._key == self.calls.name_key:
            name = json.loads(found)
            self._name = name if isinstance(name, str) else ""
            self.failed = self._name not in self.tools

    def _close(self) -> None:
        if self._name and self._arguments:
            self._deliver()
        else:
            self.failed = True
