"""Text from token ids, one at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection
from typing import Any

from ..errors import TokenizerError
from .backend import Backend

_Step = Callable[[str | bytes, bool], str | bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of each token, computed at first use. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._special = backend.special
        self._steps, self.separator, self.strip_left = _steps(backend)
        self._known: dict[int, bytes | None] = {}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes | None:
        """Return the bytes of a token inside a text or, with `first`, at its start; None for an id outside the vocabulary."""
        if first:
            return self._decode(token_id, first=True)
        if token_id not in self._known:
            self._known[token_id] = self._decode(token_id, first=False)
        return self._known[token_id]

    def _decode(self, token_id: int, first: bool) -> bytes | None:
        value: str | bytes | None = self._backend.token(token_id) if 0 <= token_id < 2**32 else None
        if value is None:
            return None
        for step in self._steps:
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode("utf-8", "replace")


def _steps(backend: Backend) -> tuple[list[_Step], bytes, int]:
    """Return (decoding steps of a token, separator between tokens, number of spaces stripped at the start of a text)."""
    if backend.decoder is None:
        return [], b" ", 0
    steps: list[_Step] = []
    strip_left = 0
    fused = False
    for config in _flat(json.loads(backend.decoder.__getstate__())):
        kind = config.get("type")
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            if config["content"] != " " or config["stop"] or strip_left:
                raise TokenizerError("tokenizer.json: only spaces at the beginning of a text can be stripped by its decoder")
            strip_left = config["start"]
        elif kind in _MAKERS and not fused:
            steps.append(_MAKERS[kind](config))
        else:
            raise TokenizerError(f"tokenizer.json: the decoder {kind!r} is not supported{' after Fuse' if fused else ''}")
    return steps, b"", strip_left


def _flat(config: dict[str, Any]) -> list[dict[str, Any]]:
    if config.get("type") != "Sequence":
        return [config]
    return [step for inner in config["decoders"] for step in _flat(inner)]


def _byte_level(config: dict[str, Any]) -> _Step:
    def step(value: str | bytes, first: bool) -> str | bytes:
        if isinstance(value, bytes):
            return value
        mapped = [_BYTE_OF.get(char) for char in value]
        return value if None in mapped else bytes(byte for byte in mapped if byte is not None)

    return step


def _replace(config: dict[str, Any]) -> _Step:
    old, new = config["pattern"].get("String"), config["content"]
    if not old:
        raise TokenizerError("tokenizer.json: a decoder that replaces a regular expression is not supported")
    return lambda value, first: value if isinstance(value, bytes) else value.replace(old, new)


def _byte_fallback(config: dict[str, Any]) -> _Step:
    def step(value: str | bytes, first: bool) -> str | bytes:
        match = None if isinstance(value, bytes) else _BYTE_TOKEN.fullmatch(value)
        return bytes([int(match[1], 16)]) if match else value

    return step


def _metaspace(config: dict[str, Any]) -> _Step:
    mark, drops_first = config["replacement"], config["prepend_scheme"] != "never"

    def step(value: str | bytes, first: bool) -> str | bytes:
        if isinstance(value, bytes):
            return value
        return value.replace(mark, "" if first and drops_first else " ")

    return step


def _strip_each(config: dict[str, Any]) -> _Step:
    content, start, stop = config["content"], config["start"], config["stop"]

    def step(value: str | bytes, first: bool) -> str | bytes:
        if isinstance(value, bytes):
            return value
        left = min(start, len(value) - len(value.lstrip(content)))
        right = min(stop, len(value) - left - len(value[left:].rstrip(content)))
        return value[left : len(value) - right]

    return step


_MAKERS: dict[str | None, Callable[[dict[str, Any]], _Step]] = {
    "ByteLevel": _byte_level,
    "Replace": _replace,
    "ByteFallback": _byte_fallback,
    "Metaspace": _metaspace,
    "Strip": _strip_each,
}


def byte_alphabet() -> dict[str, int]:
    """Return the characters that represent bytes in byte-level models: GPT-2's table (`bytes_to_unicode` of its `encoder.py`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()


class Detokenizer:
    """Converts a stream of token ids to text in whole characters.

    The concatenated results equal the decoding of all ids. The cost per token is constant.
    """

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool = True, spelled: Collection[int] = ()) -> None:
        """Create a detokenizer; special tokens in `spelled` are never skipped."""
        self._tokens = tokens
        self._skip_special = skip_special_tokens
        self._spelled = spelled
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._to_strip = tokens.strip_left

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is incomplete."""
        if self._skip_special and self._tokens.is_special(token_id) and token_id not in self._spelled:
            return ""
        piece = self._tokens.token_bytes(token_id, first=not self._begun)
        if piece is None:
            return ""
        if self._begun:
            piece = self._tokens.separator + piece
        self._begun = True
        text = self._utf8.decode(piece)
        return self._strip(text) if self._to_strip else text

    def finish(self) -> str:
        """End the stream and return the rest; bytes of an incomplete character become U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        spaces = min(self._to_strip, len(text) - len(text.lstrip(" ")))
        self._to_strip = self._to_strip - spaces if spaces == len(text) else 0
        return text[spaces:]
