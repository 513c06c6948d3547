"""What constraints have to know of a model's tokens."""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import SamplingError
from ..tokenizer.tokenizer import Tokenizer
from .grammar import GrammarCompiler


class Vocabulary:
    """The tokens of one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._running_on: dict[tuple[bytes, int], np.ndarray] = {}

    @classmethod
    def of(cls, compiler: GrammarCompiler, vocab_size: int) -> Vocabulary:
        """That of a compiler: always the same one. `vocab_size`: logits of the model."""
        with _lock:
            found = _vocabularies.get(compiler)
            if found is None:
                found = _vocabularies[compiler] = cls(compiler.tokenizer, vocab_size)
            return found

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, special ones spelled out; none for an id that is no token."""
        return self._tokenizer.token_bytes(token) or b""

    def spelled(self, text: str) -> list[int]:
        """The tokens of a fixed text. Raises `SamplingError` where there are none."""
        tokens = self.tokens_of(text)
        if not tokens:
            raise SamplingError(f"thinking_token_budget: the model's tokens cannot write {text!r}, which ends its reasoning")
        return tokens

    def tokens_of(self, text: str) -> list[int]:
        """The same; nothing where there are none."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens if text.encode() in b"".join(map(self.bytes_of, tokens)) else []

    def row(self, tokens: list[int]) -> np.ndarray:
        """Bits of these tokens, int32 `[vocab / 32]`."""
        bits = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits.view(np.int32)

    @cached_property
    def ends(self) -> np.ndarray:
        """Bits of the model's end tokens."""
        return self.row([token for token in self._tokenizer.eos_token_ids if token < self._vocab_size])

    @cached_property
    def all(self) -> np.ndarray:
        """Bits of every token."""
        return np.full(self._words, -1, np.int32)

    @cached_property
    def spaces(self) -> np.ndarray:
        """Bits of the tokens of one line break and two."""
        found = [self._tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")]
        return self.row([tokens[0] for tokens in found if len(tokens) == 1 and not self.bytes_of(tokens[0]).strip()])

    def running_on(self, mark: bytes, written: int) -> np.ndarray:
        """Bits of the tokens that finish a mark, of which `written` bytes are there, and go on with more than whitespace."""
        key = (mark, written)
        if key not in self._running_on:
            rest = mark[written:]
            texts = ((token, self.bytes_of(token)) for token in range(min(self._vocab_size, self._tokenizer.vocab_size)))
            found = [token for token, text in texts if text.startswith(rest) and text[len(rest) :].strip()]
            self._running_on[key] = self.row(found)
        return self._running_on[key]

    @cached_property
    def _words(self) -> int:
        return (self._vocab_size + 31) // 32


_vocabularies: WeakKeyDictionary[GrammarCompiler, Vocabulary] = WeakKeyDictionary()
_lock = Lock()


def overlap(text: bytes, mark: bytes) -> int:
    """Bytes of the longest end of `text` that `mark` begins with, without being all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def is_cut(text: bytes) -> bool:
    """Whether a text ends inside a UTF-8 character that could still be completed."""
    for back in range(1, min(3, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
