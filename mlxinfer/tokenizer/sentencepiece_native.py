"""SentencePiece's own library as a `Backend`.

Its BPE needs scores only. `tokenizers` needs every pair of pieces that makes a piece: for the 262 144 pieces of Gemma there are half
a million, which take two seconds and a quarter of a gigabyte.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from .library import LibraryBackend, frame_texts
from .sentencepiece import SPACE, Normalization, build_sentencepiece
from .vocabulary import CUT_OUT, TokenType, Vocabulary

PLAIN = Normalization(prefix_space=False)
"""The normalization with which a text is the same in one piece as cut at its special tokens."""


class SentencePieceBackend:
    """Implements `Backend` for a vocabulary with scores, normalized as `PLAIN`. `first` and `last` stand around every text.

    Special tokens in a text are parsed: the library is told that they are symbols of the user's. Raises `RuntimeError` for a
    vocabulary that the library does not take: with two pieces of one text, some bytes only, or not one unknown token.
    """

    def __init__(self, vocabulary: Vocabulary, first: int | None, last: int | None) -> None:
        self._processor = SentencePieceProcessor(model_proto=_model(vocabulary))
        self._vocabulary = vocabulary
        self._first, self._last = first, last
        self._unknown = self._processor.unk_id()
        self.decoder = PLAIN.decoder()
        self.special = frozenset(vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        # The unknown token is the one special token that the library does not find in a text.
        for index, part in enumerate(text.split(self._vocabulary.tokens[self._unknown])):
            ids += [self._unknown] if index else []
            ids += self._processor.encode(part)
        if not add_special_tokens:
            return ids
        return [*([] if self._first is None else [self._first]), *ids, *([] if self._last is None else [self._last])]

    def token(self, token_id: int) -> str | None:
        return self._vocabulary.tokens[token_id] if 0 <= token_id < len(self._vocabulary.tokens) else None

    def save(self, path: str) -> None:
        LibraryBackend(self.in_tokenizers()).save(path)

    def in_tokenizers(self) -> Tokenizer:
        """The same tokenizer in the library that everybody reads files of."""
        tokenizer = build_sentencepiece(self._vocabulary, "bpe", PLAIN)
        frame_texts(tokenizer, self._first, self._last)
        return tokenizer


def _model(vocabulary: Vocabulary) -> bytes:
    """A `ModelProto` (`sentencepiece_model.proto`), written as bytes: as objects, so many pieces would take seconds.

    A piece is the field 1 of the model, with its text (1), score (2) and type (3). Sizes are in two bytes, also where one would do.
    """
    pieces = _texts(vocabulary)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    if lengths.max() > _LONGEST:
        raise RuntimeError("a piece is too long")
    heads = _records(b"\x0a", _varint(lengths + 3 + 7), b"\x0a", _varint(lengths))
    scores = np.asarray(vocabulary.scores, "<f4").view(np.uint8).reshape(-1, 4)
    tails = _records(b"\x15", scores, b"\x18", _types(vocabulary)[:, None])
    bytes_too = TokenType.BYTE in vocabulary.types
    trainer = b"\x18\x02" + b"\x98\x02" + bytes([bytes_too])  # model_type (3): BPE; byte_fallback (35)
    normalizer = b"\x18\x00" + b"\x20\x00"  # neither add_dummy_prefix (3) nor remove_extra_whitespaces (4)
    return b"".join(
        [
            *chain.from_iterable(zip(heads, pieces, tails, strict=True)),
            *(b"\x12", bytes([len(trainer)]), trainer),
            *(b"\x1a", bytes([len(normalizer)]), normalizer),
        ]
    )


_LONGEST = (1 << 14) - 11
"""Bytes of a text that leave the size of its piece in two bytes of seven bits."""


def _texts(vocabulary: Vocabulary) -> list[bytes]:
    pieces = [token.encode() for token in vocabulary.tokens]
    for token_id in vocabulary.ids(*CUT_OUT):
        pieces[token_id] = vocabulary.tokens[token_id].replace(" ", SPACE).encode()
    return pieces


def _types(vocabulary: Vocabulary) -> np.ndarray:
    """Special tokens are parsed in a text as the user's symbols are; what is of no kind is never parsed."""
    types = np.full(len(vocabulary.tokens), TokenType.CONTROL, np.uint8)
    for kind, told in _TOLD.items():
        types[vocabulary.types == kind] = told
    return types


_TOLD = {
    TokenType.NORMAL: TokenType.NORMAL,
    TokenType.UNUSED: TokenType.NORMAL,
    TokenType.UNKNOWN: TokenType.UNKNOWN,
    TokenType.CONTROL: TokenType.USER_DEFINED,
    TokenType.USER_DEFINED: TokenType.USER_DEFINED,
    TokenType.BYTE: TokenType.BYTE,
}


def _varint(values: np.ndarray) -> np.ndarray:
    """uint8 `[n, 2]`: seven bits in each byte, the lower ones first, the eighth says that more follow."""
    return np.stack([values & 0x7F | 0x80, values >> 7], axis=1).astype(np.uint8)


def _records(first: bytes, second: np.ndarray, third: bytes, fourth: np.ndarray) -> list[bytes]:
    """A row of each array behind each tag, as one text of bytes per row."""
    columns = [np.full((len(second), 1), tag[0], np.uint8) for tag in (first, third)]
    rows = np.concatenate([columns[0], second, columns[1], fourth], axis=1)
    width, data = rows.shape[1], rows.tobytes()
    return [data[at : at + width] for at in range(0, len(data), width)]
