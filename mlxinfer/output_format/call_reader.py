"""Reads one call, from after its opening literal to the end of its arguments."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable

from ..tools import Tools
from .format import CallFormat, EventKind
from .streaming_json import JSON, PYTHON, ValueReader, ValueSyntax
from .streaming_match import MISS, MORE, literal, skip_whitespace

Emit = Callable[[EventKind, str], None]


class CallReader(ABC):
    """Base of all kinds. Until `begun`, nothing is emitted and the text may still turn out not to be a call."""

    def __init__(self, calls: CallFormat, tools: Tools, emit: Emit) -> None:
        self.begun = False
        """True once the name of an offered tool is read."""
        self.ended = False
        """True once the arguments are complete."""
        self.failed = False
        """True if the text is not a call or, once `begun`, not a complete one."""
        self.calls = calls
        self.tools = tools
        self._emit = emit

    @abstractmethod
    def read(self, text: str, at: int, final: bool) -> int:
        """Read from `at` and return the new position: where more text is needed, or an end. Nothing follows a `final` text."""

    @abstractmethod
    def rest(self, text: str) -> None:
        """Emit what was held back, and `text`, after the answer ended inside of a call."""

    def _begin(self, name: str) -> None:
        self.begun = True
        self._emit("call_begin", name)

    def _end(self) -> None:
        self.ended = True
        self._emit("call_end", "")

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


def find_name(text: str, at: int, final: bool, tools: Tools, end: Callable[[int, bool], int]) -> tuple[str, int]:
    """Return (name of the offered tool at `at`, position after it), or ("", `MORE` or `MISS`).

    `end` maps the position after a name to the position after the literal that must follow it.
    """
    found, more = ("", MISS), False
    for name in tools:
        if text.startswith(name, at):
            after = end(at + len(name), final)
            more |= after == MORE
            if after >= 0 and len(name) > len(found[0]):
                found = (name, after)
        elif not final and len(text) - at < len(name) and name.startswith(text[at:]):
            more = True
    return ("", MORE) if more else found


class NamedCallReader(CallReader):
    """Reads kinds "json", "gemma" and "pythonic": a name, then all arguments as one value."""

    def __init__(self, calls: CallFormat, tools: Tools, emit: Emit) -> None:
        super().__init__(calls, tools, emit)
        self._name_end = literal(calls.name_end)
        opened = calls.kind == "pythonic"
        syntax = PYTHON if opened else JSON if calls.kind == "json" else ValueSyntax((calls.quote,), "none", loose=True)
        self._opener = "" if opened else "{"
        self._value = ValueReader(syntax, opened=opened)

    def read(self, text: str, at: int, final: bool) -> int:
        if not self.begun:
            name, end = find_name(text, at, final, self.tools, lambda at, final: self._name_ends(text, at, final))
            if not name:
                return at if end == MORE else self._fail(at)
            self._begin(name)
            at = end
        at, arguments = self._value.add(text, at, final)
        if arguments:
            self._emit("arguments", arguments)
        if self._value.done:
            self._end()
        elif self._value.broken:
            self._fail(at)
        return at

    def _name_ends(self, text: str, at: int, final: bool) -> int:
        """Return the position after `name_end` if the arguments start there; otherwise `MORE` or `MISS`."""
        at = self._name_end.match(text, at, final)
        if at < 0:
            return at
        at = skip_whitespace(text, at)
        if at == len(text) and not final:
            return MORE
        return at if text.startswith(self._opener, at) else MISS

    def rest(self, text: str) -> None:
        if text:
            self._emit("arguments", text)


class ObjectCallReader(CallReader):
    """Reads kind "object" after its opening brace: name and arguments in any order, and entries such as an id."""

    _EXTRA = frozenset({"id", "type", "call_id", "tool_call_id", "index"})
    _LONGEST_KEY = 64

    def __init__(self, calls: CallFormat, tools: Tools, emit: Emit) -> None:
        super().__init__(calls, tools, emit)
        self._name = ""
        self._key = ""
        self._arguments = ""
        self._value: ValueReader | None = None
        self._streams = False
        self._json: list[str] = []

    def read(self, text: str, at: int, final: bool) -> int:
        while not self.ended and not self.failed:
            before = at
            at = self._read_key(text, at, final) if self._value is None else self._read_value(text, at, final)
            if at == before or at == len(text):
                break
        return at

    def _read_key(self, text: str, at: int, final: bool) -> int:
        """Read a key with its colon, a comma, or the closing brace."""
        start, at = at, skip_whitespace(text, at)
        if at == len(text):
            return start
        if text[at] == "}":
            self._close()
            return at + 1
        if text[at] == "," and self._key:
            self._key = ""
            return at + 1
        end = text.find('"', at + 1)
        if text[at] != '"' or self._key or (end < 0 and len(text) - at > self._LONGEST_KEY):
            return self._fail(start)
        colon = skip_whitespace(text, end + 1) if end >= 0 else len(text)
        after = skip_whitespace(text, colon + 1)
        if after >= len(text):
            return start if not final else self._fail(start)
        key = text[at + 1 : end]
        if text[colon] != ":" or key not in self._EXTRA | {self.calls.name_key, self.calls.arguments_key}:
            return self._fail(start)
        self._begin_value(key, text[after])
        return after

    def _begin_value(self, key: str, first: str) -> None:
        self._key, self._value, self._json = key, ValueReader(), []
        if key == self.calls.arguments_key and self._name and first == "{":
            self._streams = True
            self._begin(self._name)

    def _read_value(self, text: str, at: int, final: bool) -> int:
        value = self._value
        assert value is not None
        at, piece = value.add(text, at, final)
        if piece:
            if self._streams:
                self._emit("arguments", piece)
            else:
                self._json.append(piece)
        if value.broken:
            return self._fail(at)
        if value.done:
            self._value = None
            self._take("".join(self._json))
        return at

    def _take(self, found: str) -> None:
        """Use a complete value."""
        if self._streams:
            self._end()
        elif self._key == self.calls.name_key:
            name = json.loads(found)
            self._name = name if isinstance(name, str) else ""
            if self._name not in self.tools:
                self.failed = True
            elif self._arguments:
                self._deliver()
        elif self._key == self.calls.arguments_key:
            self._arguments = as_object(found)
            if not self._arguments:
                self.failed = True
            elif self._name:
                self._deliver()

    def _close(self) -> None:
        """End the object; missing arguments are an empty object."""
        self._arguments = self._arguments or "{}"
        if self._name:
            self._deliver()
        else:
            self.failed = True

    def _deliver(self) -> None:
        self._begin(self._name)
        self._emit("arguments", self._arguments)
        self._end()

    def rest(self, text: str) -> None:
        if text:
            self._emit("arguments", text)


def as_object(found: str) -> str:
    """Return arguments as the JSON text of an object; a JSON string of an object and null are accepted. "" for anything else."""
    try:
        value = json.loads(found)
        if isinstance(value, str):
            found, value = value, json.loads(value)
    except (ValueError, RecursionError):
        return ""
    if value is None:
        return "{}"
    return found if isinstance(value, dict) else ""
