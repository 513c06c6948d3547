"""Byte-level BPE from a vocabulary and its merges. The first texts are cut with the part of the vocabulary that they can contain.

The `tokenizers` library takes 0.1 s to read 49,152 tokens and their merges, a quarter of the time to a new process's first token. Merges
only ever make pieces of a word, so that a model of those pieces cuts a text as the whole vocabulary does, and is made in some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from threading import Lock

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..background import Stop, later
from ..errors import TokenizerError
from .backend import TokenizersBackend, frame_texts, tokenizer_errors
from .pretokenizers import PreTokenization
from .vocab import TokenType, Vocabulary, split_merges

_AT_ONCE = 4096
"""A vocabulary of at most so many tokens is read whole from the beginning."""
_TEXTS, _CHARACTERS, _WORD = 4, 4000, 64
"""So many texts are cut with a part of the vocabulary, if they and their words have at most so many characters."""
_DELAY_S = 2.0
"""Seconds until the whole is read in any case, so that no later text waits for it."""


class ByteLevelBackend:
    """Implements `Backend`. Raises `TokenizerError`; for wrong merges of a large vocabulary not before the whole of it is read."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenization, first: int | None, last: int | None) -> None:
        """`merges` are pairs joined by a space, best first; `first` and `last` the ids around a text."""
        self.decoder = decoders.ByteLevel()
        self.special = frozenset(vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL))
        self._tokens, self._index, self._added = vocabulary.tokens, vocabulary.index(), vocabulary.added_tokens()
        self._merges, self._pre, self._frame = merges, pre, (first, last)
        around = {self._tokens[token_id] for token_id in self._frame if token_id is not None}
        self._always = around | {token.content for token in self._added}
        self._lock, self._parts_left = Lock(), _TEXTS
        self._whole: TokenizersBackend | None = None
        if len(self._tokens) <= _AT_ONCE:
            self._read_whole()
        else:
            later(self._read_later, delay_s=_DELAY_S, nice=0)

    def token(self, token_id: int) -> str | None:
        tokens = self._tokens
        if tokens or self._whole is None:
            return tokens[token_id] if token_id < len(tokens) else None
        return self._whole.token(token_id)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            part = self._part(text) if self._whole is None and self._parts_left and len(text) <= _CHARACTERS else None
            backend = part or self._read_whole()
        return backend.encode(text, add_special_tokens)

    def save(self, path: str) -> None:
        with self._lock:
            whole = self._read_whole()
        whole.save(path)

    def _read_later(self, stop: Stop) -> None:
        with self._lock, suppress(TokenizerError):  # it is raised for the next text
            if not stop():
                self._read_whole()

    def _read_whole(self) -> TokenizersBackend:
        if self._whole is None:
            self._whole = TokenizersBackend(self._tokenizer(self._index, self._merges))
            self._tokens, self._index, self._merges = (), {}, ()  # the library has them now
        return self._whole

    def _part(self, text: str) -> TokenizersBackend | None:
        """A backend for this text; None where a word is too long, or has a byte that is no token."""
        self._parts_left -= 1
        words = set(self._words(text))
        if any(len(word) > _WORD for word in words) or not self._index.keys() >= set().union(*words):
            return None
        pieces = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, len(word) + 1)}
        tokens = self._index.keys() & pieces
        pairs = {f"{token[:i]} {token[i:]}" for token in tokens for i in range(1, len(token))}
        index = {token: self._index[token] for token in tokens | self._always}
        return TokenizersBackend(self._tokenizer(index, [merge for merge in self._merges if merge in pairs]))

    def _words(self, text: str) -> Iterator[str]:
        """The words of a text as the model sees them, spelled in the letters that stand for bytes."""
        letters = {letter: len(self._tokens) + place for place, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        index = letters | {token: self._index[token] for token in self._always}
        found = self._tokenizer(index, ()).encode(text, add_special_tokens=False)
        for _, word in groupby(zip(found.tokens, found.word_ids, strict=True), key=lambda pair: pair[1]):
            yield "".join(letter for letter, _ in word if letter in letters)

    def _tokenizer(self, index: dict[str, int], merges: Sequence[str]) -> Tokenizer:
        with tokenizer_errors("building the tokenizer of the GGUF file"):
            tokenizer = Tokenizer(models.BPE(index, split_merges(merges), ignore_merges=self._pre.ignore_merges))
            normalizer = self._pre.normalizer()
            if normalizer is not None:
                tokenizer.normalizer = normalizer
            tokenizer.pre_tokenizer = self._pre.pre_tokenizer()
            tokenizer.decoder = self.decoder
            tokenizer.add_tokens(self._added)
            frame_texts(tokenizer, *self._frame)
            return tokenizer
