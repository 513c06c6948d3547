"""Converts a value in JSON or a similar syntax to JSON text while it is generated."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.encoder import encode_basestring

from .streaming_match import overlap

_DEEPEST = 200
_LONGEST_SCALAR = 512
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SCALAR = re.compile(r"[^\s,:=\[\]{}()\"'<]*")
_BARE_KEY = re.compile(r"[^,:=\[\]{}()<]*")
_CONTROL = re.compile(r"[\x00-\x1f]")
_WHITESPACE = re.compile(r"[ \t\r\n]*")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {**_WORDS, "True": "true", "False": "false", "None": "null"}
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """Differences from JSON."""

    quotes: tuple[str, ...] = ('"',)
    """Quotes around texts."""
    escapes: str = "json"
    """Meaning of a backslash in a text: as in "json", as in "python", or "none"."""
    loose: bool = False
    """True if bare keys and Python's words are accepted and whitespace is normalised."""


JSON = ValueSyntax()
PYTHON = ValueSyntax(("'", '"'), "python", loose=True)


def escaped(text: str) -> str:
    """Return the text escaped for the inside of a JSON string."""
    return encode_basestring(text)[1:-1]


class ValueReader:
    """Reads one value of a syntax. `opened`: the "(" before keyword arguments has been read already."""

    def __init__(self, syntax: ValueSyntax = JSON, *, opened: bool = False) -> None:
        self.done = False
        """True once the value is complete."""
        self.broken = False
        """True if the value is invalid: the text so far is valid, the next character is not."""
        self._syntax = syntax
        self._opened = opened
        self._stack: list[str] = [")"] if opened else []
        self._expect = "key or end" if opened else "value"
        self._quote = ""
        self._key = False
        self._comma = ""
        self._space = ""
        self._out: list[str] = ["{"] if opened else []

    def add(self, text: str, at: int, final: bool) -> tuple[int, str]:
        """Read from `at` and return (new position, JSON text). Nothing follows a `final` text."""
        while not self.done and not self.broken:
            before = at
            at = self._text(text, at) if self._quote else self._token(text, at, final)
            if at < 0:
                at = before
                break
            if at == len(text):
                break
        out, self._out = "".join(self._out), []
        return at, out

    def _token(self, text: str, at: int, final: bool) -> int:
        """Read whitespace or one token. Returns the new position, or -1 if more text is needed."""
        end = _WHITESPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
        if end > at:
            self._space += "" if self._syntax.loose else text[at:end]
            return end
        if at == len(text):
            return -1
        end = self._take(text, at, self._space, final)
        if end >= 0:
            self._space = ""
        return end

    def _take(self, text: str, at: int, space: str, final: bool) -> int:
        """Read one token that follows `space`. Returns the new position, or -1 if more text is needed."""
        character = text[at]
        if self._expect == "colon":
            return self._after_key(space, character, at)
        if self._expect == "comma or end":
            if character == ",":
                self._comma = space + ","
                self._expect = "value or end" if self._stack[-1] in "])" and not self._named() else "key or end"
                return at + 1
            return self._end(space, character, at)
        if self._expect.endswith("or end") and character == self._stack[-1]:
            return self._end(space, character, at)
        return self._begin(text, at, space, final)

    def _named(self) -> bool:
        """Return True if the innermost bracket is that of keyword arguments."""
        return self._opened and len(self._stack) == 1

    def _after_key(self, space: str, character: str, at: int) -> int:
        if character != ("=" if self._named() else ":"):
            self.broken = True
            return at
        self._out.append(": " if self._syntax.loose else space + ":")
        self._expect = "value"
        return at + 1

    def _end(self, space: str, character: str, at: int) -> int:
        """Read a closing bracket and drop a comma before it."""
        if character != self._stack[-1]:
            self.broken = True
            return at
        is_object = character == "}" or self._named()
        self._out.append(self._comma.replace(",", "") + space + ("}" if is_object else "]"))
        self._comma = ""
        self._stack.pop()
        self._complete()
        return at + 1

    def _complete(self) -> None:
        self._expect = "comma or end"
        self.done = not self._stack

    def _separate(self, space: str) -> None:
        """Write the pending comma, now that a value follows it."""
        self._out.append((", " if self._syntax.loose and self._comma else self._comma) + space)
        self._comma = ""

    def _begin(self, text: str, at: int, space: str, final: bool) -> int:
        """Read the start of a key or a value."""
        is_key = self._expect.startswith("key")
        for quote in self._syntax.quotes:
            if text.startswith(quote, at):
                self._separate(space)
                self._out.append('"')
                self._quote, self._key = quote, is_key
                return at + len(quote)
            if not final and len(text) - at < len(quote) and quote.startswith(text[at:]):
                return -1
        if is_key:
            return self._bare(text, at, space, final, is_key=True) if self._syntax.loose else self._break(at)
        character = text[at]
        if character in "[{" or (character == "(" and self._syntax.loose):
            if len(self._stack) == _DEEPEST:
                return self._break(at)
            self._separate(space)
            self._out.append("{" if character == "{" else "[")
            self._stack.append({"{": "}", "[": "]", "(": ")"}[character])
            self._expect = "key or end" if character == "{" else "value or end"
            return at + 1
        return self._bare(text, at, space, final, is_key=False)

    def _break(self, at: int) -> int:
        self.broken = True
        return at

    def _bare(self, text: str, at: int, space: str, final: bool, *, is_key: bool) -> int:
        """Read a number, a word, or a bare key."""
        end = (_BARE_KEY if is_key else _SCALAR).match(text, at).end()  # type: ignore[union-attr]  # they match anything
        if end - at > _LONGEST_SCALAR or end == at:
            return self._break(at)
        if end == len(text) and not final:
            return -1
        bare = text[at:end]
        if is_key:
            self._separate(space)
            self._out.append(json.dumps(bare, ensure_ascii=False))
            self._expect = "colon"
            return end
        known = (_PYTHON_WORDS if self._syntax.loose else _WORDS).get(bare)
        if known is None and not _NUMBER.fullmatch(bare):
            return self._break(at)
        self._separate(space)
        self._out.append(known or bare)
        self._complete()
        return end

    def _text(self, text: str, at: int) -> int:
        """Read the inside of a text, to its end or to a character that needs more text."""
        end = text.find(self._quote, at)
        slash = -1 if self._syntax.escapes == "none" else text.find("\\", at, None if end < 0 else end)
        if slash >= 0:
            self._write(text[at:slash])
            return self._escape(text, slash) if slash == at else slash
        if end >= 0:
            self._write(text[at:end])
            self._out.append('"')
            self._expect = "colon" if self._key else "comma or end"
            if not self._key:
                self._complete()
            length, self._quote = len(self._quote), ""
            return end + length
        end = len(text) - overlap(text, self._quote)
        self._write(text[at:end])
        return end if end > at else -1

    def _write(self, text: str) -> None:
        if self._syntax.escapes == "json":
            self._out.append(_CONTROL.sub(lambda found: escaped(found[0]), text) if _CONTROL.search(text) else text)
        else:
            self._out.append(escaped(text))

    def _escape(self, text: str, at: int) -> int:
        """Read an escape sequence. Returns the new position, or -1 if more text is needed."""
        if at + 1 == len(text):
            return -1
        kind, json_escapes = text[at + 1], self._syntax.escapes == "json"
        digits = _HEX_DIGITS.get(kind, 0) if not json_escapes or kind == "u" else 0
        code = text[at + 2 : at + 2 + digits]
        if re.fullmatch("[0-9a-fA-F]*", code) and len(code) < digits and at + 2 + len(code) == len(text):
            return -1
        number = int(code, 16) if digits and len(code) == digits and re.fullmatch("[0-9a-fA-F]+", code) else -1
        if 0 <= number < 0x110000:
            self._out.append(f"\\u{code}" if digits == 4 else escaped(chr(number)))
            return at + 2 + digits
        if json_escapes:
            self._out.append("'" if kind == "'" else f"\\{kind}" if kind in '"\\/bfnrt' else "\\\\" + escaped(kind))
        else:
            self._out.append(escaped(kind if kind in "\\'\"" else _PYTHON_ESCAPES.get(kind, "\\" + kind)))
        return at + 2
