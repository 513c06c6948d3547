"""Reads calls with tagged arguments, similar to XML: texts are raw, and the tool's schema has the types."""

from __future__ import annotations

import json

from ..tools import Tools
from .call_reader import CallReader, Emit, find_name
from .format import CallFormat
from .schema_types import json_of, types_of
from .streaming_json import escaped
from .streaming_match import KEY, MISS, MORE, Literal, literal, overlap, skip_whitespace

_LONGEST_KEY = 256
_CDATA = "<![CDATA["
"""Opening that some models write before a text, with "]]>" after it."""


class TaggedCallReader(CallReader):
    """Reads kind "tagged". Texts are emitted as they arrive, other values once they are complete."""

    def __init__(self, calls: CallFormat, tools: Tools, emit: Emit) -> None:
        super().__init__(calls, tools, emit)
        self._name_end, self._key_begin = literal(calls.name_end), literal(calls.key_begin)
        self._call_end = literal(calls.call_end.lstrip())
        self._key_ends = [(text, literal(text)) for text in (calls.key_end, calls.key_end_json) if text]
        self._schema: object = None
        self._types: frozenset[str] | None = None
        self._is_text = False
        self._count = 0
        self._in_value = False
        self._value_begun = False
        self._value: list[str] = []
        self._end_value_with(calls.value_end)
        self._lead = ""

    def _end_value_with(self, text: str) -> None:
        self._value_end, self._ending = literal(text), literal(text.lstrip())

    def read(self, text: str, at: int, final: bool) -> int:
        if not self.begun:
            name, end = find_name(text, at, final, self.tools, lambda at, final: self._name_ends(text, at, final))
            if not name:
                return at if end == MORE else self._fail(at)
            self._schema = self.tools[name].parameters.schema
            self._begin(name)
            self._emit("arguments", "{")
            at = end
        while not self.ended and not self.failed:
            before = at
            at = self._read_value(text, at, final) if self._in_value else self._read_key(text, at, final)
            if at == before or at == len(text):
                break
        return at

    def _name_ends(self, text: str, at: int, final: bool) -> int:
        """Return the position after `name_end` if an argument or the call's end follows; otherwise `MORE` or `MISS`."""
        at = self._name_end.match(text, at, final)
        return at if at < 0 or (end := self._next(text, at, final)[1]) >= 0 else end

    def _next(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """Return ("key" or "end", position after that literal), or ("", `MORE` or `MISS`)."""
        at = skip_whitespace(text, at)
        if at == len(text):
            return "", MISS if final else MORE
        key, end = self._key_begin.match(text, at, final), self._call_end.match(text, at, final)
        if MORE in (key, end):
            return "", MORE
        return ("key", key) if key > end else ("end" if end >= 0 else "", end)

    def _read_key(self, text: str, at: int, final: bool) -> int:
        kind, begin = self._next(text, at, final)
        if kind == "end":
            self._emit("arguments", "}")
            self._end()
            return at
        if not kind:
            return at if begin == MORE else self._fail(at)
        for place in range(begin, min(len(text), begin + _LONGEST_KEY)):
            for key_end, ending in self._key_ends:
                end = ending.match(text, place, final) if text[place] == key_end.lstrip()[0] else MISS
                if end == MORE:
                    return at
                if end >= 0 and place > begin:
                    return self._begin_value(text[begin:place].strip(), key_end, ending, text, place)
        return at if len(text) < begin + _LONGEST_KEY and not final else self._fail(at)

    def _begin_value(self, key: str, key_end: str, ending: Literal, text: str, place: int) -> int:
        """Start a value and return the position after the literal. Whitespace beyond the literal's belongs to the value."""
        self._types = types_of(self._schema, key)
        if self.calls.key_end_json:
            self._types = frozenset({"string"}) if key_end == self.calls.key_end else (self._types or frozenset({"object"})) - {"string"}
        self._is_text = self._types == frozenset({"string"})
        self._lead = ending.trail
        self._end_value_with(self.calls.value_end.replace(KEY, key))
        self._emit("arguments", (", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        self._in_value, self._value_begun, self._value = True, False, []
        return literal(key_end.rstrip()).match(text, place, True)

    def _read_value(self, text: str, at: int, final: bool) -> int:
        if not self._value_begun:
            begin = at + (len(self._lead) if text.startswith(self._lead, at) else 0)
            if not final and ((len(text) < begin + len(_CDATA) and _CDATA.startswith(text[begin:])) or len(text) < at + len(self._lead)):
                return at
            at, self._value_begun = begin, True
            if text.startswith(_CDATA, at):
                at += len(_CDATA)
                self._end_value_with("]]>" + self._value_end.text)
            if self._is_text:
                self._emit("arguments", '"')
        trail, ending = self._value_end.lead, self._ending
        place = at
        while True:
            place, end = ending.find(text, place, final)
            follows = self._next(text, end, final)[1] if end >= 0 else end
            if end < 0 or follows != MISS:
                break
            place += 1
        hold = place if end == MISS and final else place - self._trailing(text, at, place, trail)
        if end < 0 or follows < 0:
            if end == MISS and not final:
                hold = min(hold, len(text) - self._trailing(text, at, len(text), trail))
            self._add(text[at : max(at, hold)])
            return max(at, hold)
        if trail and text.endswith(trail, at, place):
            place -= len(trail)
        self._add(text[at:place])
        self._end_value()
        return end

    @staticmethod
    def _trailing(text: str, at: int, place: int, trail: str) -> int:
        """Number of characters before `place` that may belong to the value's closing literal."""
        if not trail:
            return 0
        piece = text[max(at, place - len(trail)) : place]
        return len(trail) if piece.endswith(trail) else overlap(piece, trail)

    def _add(self, piece: str) -> None:
        if not piece:
            return
        if self._is_text:
            self._emit("arguments", escaped(piece))
        else:
            self._value.append(piece)

    def _end_value(self) -> None:
        self._emit("arguments", '"' if self._is_text else json_of("".join(self._value), self._types))
        self._in_value = False

    def rest(self, text: str) -> None:
        if self._in_value:
            self._add(text)
            if not self._is_text and self._value:
                self._emit("arguments", "".join(self._value))
        elif text:
            self._emit("arguments", text)
