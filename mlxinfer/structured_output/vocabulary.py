"""Token properties that constraints need."""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import SamplingError
from ..tokenizer.tokenizer import Tokenizer
from .grammar import GrammarCompiler


class GrammarVocabulary:
    """Tokens of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._running_on: dict[tuple[bytes, int], np.ndarray] = {}

    @classmethod
    def of(cls, compiler: GrammarCompiler, vocab_size: int) -> GrammarVocabulary:
        """Return the vocabulary of a compiler, created once; `vocab_size` is the number of logits."""
        with _lock:
            found = _vocabularies.get(compiler)
            if found is None:
                found = _vocabularies[compiler] = cls(compiler.tokenizer, vocab_size)
            return found

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, with special tokens spelled out; b"" for an unused id."""
        return self._tokenizer.token_bytes(token) or b""

    def spelled(self, text: str) -> list[int]:
        """Return the tokens of a fixed text. Raises `SamplingError` if the tokens cannot write it."""
        tokens = self.tokens_of(text)
        if not tokens:
            raise SamplingError(f"thinking_token_budget: the model's tokens cannot write {text!r}, which ends its reasoning")
        return tokens

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a fixed text; empty if the tokens cannot write it."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens if text.encode() in b"".join(map(self.bytes_of, tokens)) else []

    def row(self, tokens: list[int]) -> np.ndarray:
        """Return a mask of these tokens, int32 `[vocab / 32]`."""
        bits = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits.view(np.int32)

    @cached_property
    def ends(self) -> np.ndarray:
        """Mask of the EOS tokens."""
        return self.row([token for token in self._tokenizer.eos_token_ids if token < self._vocab_size])

    @cached_property
    def all(self) -> np.ndarray:
        """Mask of all tokens."""
        return np.full(self._words, -1, np.int32)

    @cached_property
    def spaces(self) -> np.ndarray:
        """Mask of the tokens of one and two line breaks."""
        found = [self._tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")]
        return self.row([tokens[0] for tokens in found if len(tokens) == 1 and not self.bytes_of(tokens[0]).strip()])

    def running_on(self, mark: bytes, written: int) -> np.ndarray:
        """Return a mask of tokens that complete `mark`, after its first `written` bytes, and continue with more than whitespace."""
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


_vocabularies: WeakKeyDictionary[GrammarCompiler, GrammarVocabulary] = WeakKeyDictionary()
_lock = Lock()


def overlap(text: bytes, mark: bytes) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def is_cut(text: bytes) -> bool:
    """Return True if a text ends inside a UTF-8 character."""
    for back in range(1, min(3, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
