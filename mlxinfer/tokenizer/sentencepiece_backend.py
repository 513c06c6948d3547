"""SentencePiece's own library as a `Backend`.

Its BPE needs scores only. `tokenizers` needs every pair of pieces that makes a piece: for the 262 144 pieces of Gemma there are half
a million, which take two seconds and a quarter of a gigabyte.
"""

from __future__ import annotations

import numpy as np
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from .backend import TokenizersBackend, frame_texts
from .sentencepiece import PLAIN, SPACE, build_sentencepiece
from .vocab import CUT_OUT, TokenType, Vocabulary


class SentencePieceBackend:
    """Implements `Backend` for a vocabulary with scores, normalized as `PLAIN`. `first` and `last` stand around every text.

    Special tokens in a text are parsed: the library is told that they are symbols of the user's. Raises `RuntimeError` for a
    vocabulary that the library does not take: with two pieces of one text, some bytes only, or not one unknown token.
    """

    def __init__(self, vocabulary: Vocabulary, first: int | None, last: int | None) -> None:
        self._processor = SentencePieceProcessor(model_proto=_model(vocabulary))
        self._types, self._scores = vocabulary.types, vocabulary.scores
        # All other texts are kept by the library, once.
        self._cut_out = {token_id: vocabulary.tokens[token_id] for token_id in vocabulary.ids(*CUT_OUT)}
        self._first, self._last = first, last
        self._unknown = self._processor.unk_id()
        self.decoder = PLAIN.decoder()
        self.special = frozenset(vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        # The unknown token is the one special token that the library does not find in a text.
        for index, part in enumerate(text.split(self._cut_out[self._unknown])):
            ids += [self._unknown] if index else []
            ids += self._processor.encode(part)
        if not add_special_tokens:
            return ids
        return [*([] if self._first is None else [self._first]), *ids, *([] if self._last is None else [self._last])]

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._types):
            return None
        return self._cut_out.get(token_id) or self._text(token_id)

    def save(self, path: str) -> None:
        TokenizersBackend(self.in_tokenizers()).save(path)

    def in_tokenizers(self) -> Tokenizer:
        """The same tokenizer in the library that everybody reads files of."""
        tokens = [self._cut_out.get(token_id) or self._text(token_id) for token_id in range(len(self._types))]
        tokenizer = build_sentencepiece(Vocabulary(tokens, self._types, self._scores), "bpe", PLAIN)
        frame_texts(tokenizer, self._first, self._last)
        return tokenizer

    def _text(self, token_id: int) -> str:
        text: str = self._processor.id_to_piece(token_id)
        return text


def _model(vocabulary: Vocabulary) -> bytes:
    """A `ModelProto` (`sentencepiece_model.proto`), written as bytes: as objects, so many pieces would take seconds.

    A piece is field 1 of the model, with its text (1), score (2) and type (3). Sizes are in two bytes, also where one would do.
    """
    text, lengths = _texts(vocabulary)
    if lengths.max() > _LONGEST:
        raise RuntimeError("a piece is too long")
    scores = np.asarray(vocabulary.scores, "<f4").view(np.uint8).reshape(-1, 4)
    before = _columns(0x0A, _varint(lengths + 3 + 7), 0x0A, _varint(lengths))
    after = _columns(0x15, scores, 0x18, _types(vocabulary)[:, None])
    counts = np.stack([np.full_like(lengths, before.shape[1]), lengths, np.full_like(lengths, after.shape[1])], axis=1)
    is_text = np.repeat(np.tile([False, True, False], len(lengths)), counts.reshape(-1))
    pieces = np.empty(len(is_text), np.uint8)
    pieces[is_text] = text
    pieces[~is_text] = np.concatenate([before, after], axis=1).reshape(-1)
    return pieces.tobytes() + _settings(TokenType.BYTE in vocabulary.types)


def _settings(byte_fallback: bool) -> bytes:
    trainer = b"\x18\x02" + b"\x98\x02" + bytes([byte_fallback])  # model_type (3) is BPE; byte_fallback (35)
    normalizer = b"\x18\x00" + b"\x20\x00"  # neither add_dummy_prefix (3) nor remove_extra_whitespaces (4)
    return b"\x12" + bytes([len(trainer)]) + trainer + b"\x1a" + bytes([len(normalizer)]) + normalizer


_LONGEST = (1 << 14) - 11
"""Bytes of a text that leave the size of its piece in two bytes of seven bits."""


def _texts(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 of all pieces, uint8, and the int64 length of each in bytes. All are encoded in one call, with zeros between them."""
    tokens = list(vocabulary.tokens)
    for token_id in vocabulary.ids(*CUT_OUT):
        tokens[token_id] = tokens[token_id].replace(" ", SPACE)
    joined = np.frombuffer("\0".join([*tokens, ""]).encode(), np.uint8)
    ends = np.flatnonzero(joined == 0)
    if len(ends) != len(tokens):
        raise RuntimeError("a piece has a zero in it")
    return joined[joined != 0], np.diff(ends, prepend=-1) - 1


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


def _columns(*parts: int | np.ndarray) -> np.ndarray:
    """Columns of bytes side by side; a number stands in every row."""
    rows = max(len(part) for part in parts if isinstance(part, np.ndarray))
    return np.concatenate([np.full((rows, 1), part, np.uint8) if isinstance(part, int) else part for part in parts], axis=1)
