"""Byte-level BPE from a vocabulary and its merges, which a file lists or ranks imply.

The first texts are encoded with the part of the vocabulary that can occur in them. Reading 49,152 tokens and their merges takes the
`tokenizers` library 0.1 s, a quarter of the time to a new process's first token. Merges only make pieces of a word, so a model of these
pieces splits a text exactly as the whole vocabulary does, and is built in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ..errors import TokenizerError
from ..util.background import Stop, later
from ..util.dataclass import dataclass
from .backend import TokenizersBackend, encode_parts, frame_texts, tokenizer_errors
from .pretokenizers import PreTokenization
from .vocab import CUT_OUT, TokenType, Vocabulary, split_merges

_AT_ONCE = 4096
"""Largest vocabulary that is read whole at the start."""
_TEXTS, _CHARACTERS, _WORD = 4, 4000, 64
"""Limits on encoding with a part of the vocabulary: number of texts, characters of a text, characters of a word."""
_DELAY_S = 2.0
"""Seconds until the whole vocabulary is read in the background."""


class Merges(Protocol):
    """Pairs of tokens that are merged, best first."""

    def whole(self) -> list[tuple[str, str]]:
        """Return all merges. Raises `TokenizerError`."""
        ...

    def among(self, pieces: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return the merges that make one of these tokens, which are in the order of their ids."""
        ...


class WrittenMerges:
    """Implements `Merges` for a listed form: two tokens separated by a space."""

    def __init__(self, merges: Sequence[str]) -> None:
        self._merges = merges

    def whole(self) -> list[tuple[str, str]]:
        return split_merges(self._merges)

    def among(self, pieces: Mapping[str, int]) -> list[tuple[str, str]]:
        pairs = {f"{token[:i]} {token[i:]}" for token in pieces for i in range(1, len(token))}
        return split_merges([merge for merge in self._merges if merge in pairs])


class ByteLevelBackend:
    """Implements `Backend`. Raises `TokenizerError`, for invalid merges of a large vocabulary only once all of it is read."""

    def __init__(self, vocabulary: Vocabulary, merges: Merges, pre: PreTokenization, first: int | None, last: int | None) -> None:
        """Create a backend that adds the ids `first` and `last` around texts."""
        self.decoder = decoders.ByteLevel()
        self.special = frozenset(vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL))
        self._pre, self._frame = pre, ([] if first is None else [first], [] if last is None else [last])
        self._source: _Unread | TokenizersBackend = _Unread(vocabulary, merges, pre, (first, last))
        self._lock, self._parts_left = Lock(), _TEXTS
        if len(vocabulary.tokens) <= _AT_ONCE:
            self._read_whole()
        else:
            later(self._read_later, delay_s=_DELAY_S, nice=0)

    def token(self, token_id: int) -> str | None:
        return self._source.token(token_id)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            backend = self._part(text) or self._read_whole()
        parts = self._pre.parts(text)
        if len(parts) < 2:
            return backend.encode(text, add_special_tokens)
        ids = [token_id for part in parts for token_id in backend.encode(part, False)]
        return [*self._frame[0], *ids, *self._frame[1]] if add_special_tokens else ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        if len(self._pre.parts(text)) > 1:
            return encode_parts(self, text, mark)
        with self._lock:
            whole = self._read_whole()
        return whole.encode_marked(text, mark)

    def save(self, path: str) -> None:
        with self._lock:
            whole = self._read_whole()
        whole.save(path)

    def _part(self, text: str) -> TokenizersBackend | None:
        if not isinstance(self._source, _Unread) or not self._parts_left or len(text) > _CHARACTERS:
            return None
        self._parts_left -= 1
        return self._source.part(text)

    def _read_later(self, stop: Stop) -> None:
        with self._lock, suppress(TokenizerError):  # the next text raises it again
            if not stop():
                self._read_whole()

    def _read_whole(self) -> TokenizersBackend:
        if isinstance(self._source, _Unread):
            self._source = self._source.whole()
        return self._source


@dataclass(frozen=True)
class _Unread:
    """Input from which the library builds a tokenizer."""

    vocabulary: Vocabulary
    merges: Merges
    pre: PreTokenization
    frame: tuple[int | None, int | None]

    def token(self, token_id: int) -> str | None:
        tokens = self.vocabulary.tokens
        return tokens[token_id] if token_id < len(tokens) else None

    def whole(self) -> TokenizersBackend:
        return TokenizersBackend(self._tokenizer(self.vocabulary.index(), self.merges.whole()))

    def part(self, text: str) -> TokenizersBackend | None:
        """Return a backend for this text only; None if a word is too long or has a byte without a token."""
        words = set(self._words(text))
        if any(len(word) > _WORD for word in words):
            return None
        pieces = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, len(word) + 1)}
        index = {token: token_id for token_id, token in enumerate(self.vocabulary.tokens) if token in pieces}
        if not index.keys() >= set().union(*words):
            return None
        return TokenizersBackend(self._tokenizer(index | self._always(), self.merges.among(index)))

    def _words(self, text: str) -> Iterator[str]:
        """Yield the words of a text in the byte alphabet."""
        size = len(self.vocabulary.tokens)
        letters = {letter: size + place for place, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        found = self._tokenizer(letters | self._always(), []).encode(text, add_special_tokens=False)
        for _, word in groupby(zip(found.tokens, found.word_ids, strict=True), key=itemgetter(1)):
            yield "".join(letter for letter, _ in word if letter in letters)

    def _always(self) -> dict[str, int]:
        """Tokens that are matched before a text is split into words, and the tokens around a text."""
        around = [token_id for token_id in self.frame if token_id is not None]
        return {self.vocabulary.tokens[token_id]: token_id for token_id in [*self.vocabulary.ids(*CUT_OUT), *around]}

    def _tokenizer(self, index: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        with tokenizer_errors("building the tokenizer"):
            tokenizer = Tokenizer(models.BPE(index, merges, ignore_merges=self.pre.ignore_merges))
            normalizer = self.pre.normalizer()
            if normalizer is not None:
                tokenizer.normalizer = normalizer
            tokenizer.pre_tokenizer = self.pre.pre_tokenizer()
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_tokens(self.vocabulary.added_tokens())
            frame_texts(tokenizer, *self.frame)
            return tokenizer
