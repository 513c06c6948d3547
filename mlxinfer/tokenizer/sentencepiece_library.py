"""SentencePiece's own library as a `Backend`.

The library joins characters that are no pieces themselves, takes unused pieces apart again, and normalizes as the model was trained:
`tokenizers` has no form for any of that. It also needs scores only, where `tokenizers` needs every pair of pieces that makes a piece: for
the 262,144 pieces of Gemma these are half a million, which take two seconds and a quarter of a gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import TokenizerError
from .backend import TokenizersBackend, encode_parts
from .search import TokenSearch
from .sentencepiece import PLAIN, SPACE, SentencePieceModel
from .vocab import CUT_OUT, TokenType, Vocabulary

_SPACES = re.compile(r"\s*")


def backend_of_file(model: SentencePieceModel, proto: Any, declared: Collection[int]) -> SentencePieceBackend:
    """Make the backend of a file's `ModelProto`, which is changed. `declared`: ids that other files describe. User-defined pieces that only
    the model knows are left to the library. Raises `RuntimeError` as `SentencePieceBackend` does."""
    vocabulary = model.vocabulary
    ids = vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL)
    ids += [token_id for token_id in vocabulary.ids(TokenType.USER_DEFINED) if token_id in declared]
    for token_id in ids:
        if token_id < len(proto.pieces) and proto.pieces[token_id].type != TokenType.UNKNOWN:
            proto.pieces[token_id].type = TokenType.CONTROL
    return SentencePieceBackend(model, proto.SerializeToString(), ids)


def backend_of_vocabulary(model: SentencePieceModel) -> SentencePieceBackend:
    """Make the backend of a BPE vocabulary with scores, as GGUF has it. Unused pieces are used.

    Raises `RuntimeError` as `SentencePieceBackend` does.
    """
    vocabulary = model.vocabulary
    if model.normalization == PLAIN and not model.rstrip:
        # The library finds special tokens itself, if it is told that they are user-defined, but for the unknown token.
        return SentencePieceBackend(
            model, _model(vocabulary, _library_types(vocabulary, TokenType.USER_DEFINED), False), vocabulary.ids(TokenType.UNKNOWN)
        )
    types = _library_types(vocabulary, TokenType.CONTROL)
    ids = [token_id for token_id in vocabulary.ids(*CUT_OUT) if vocabulary.tokens[token_id].strip(SPACE + " ")]
    types[[token_id for token_id in ids if types[token_id] != TokenType.UNKNOWN]] = TokenType.CONTROL
    return SentencePieceBackend(model, _model(vocabulary, types, model.normalization.prefix_space), ids)


class SentencePieceBackend:
    """Implements `Backend`. Raises `RuntimeError` for a vocabulary that the library refuses: one with two equal pieces, with some bytes
    only, or without exactly one unknown token."""

    def __init__(self, model: SentencePieceModel, serialized: bytes, cut: Collection[int]) -> None:
        """`serialized` is the `ModelProto`; the tokens with the ids `cut` are found in a text before the library sees it."""
        from sentencepiece import SentencePieceProcessor  # few models need it

        vocabulary = model.vocabulary
        self._processor = SentencePieceProcessor(model_proto=serialized)
        self._in_library: int = self._processor.get_piece_size()
        self._size = len(vocabulary.tokens)
        # All other texts are kept by the library, once.
        self._texts = {token_id: vocabulary.tokens[token_id] for token_id in vocabulary.ids(*CUT_OUT)}
        self._texts |= {token_id: vocabulary.tokens[token_id] for token_id in range(self._in_library, self._size)}
        self._cut = {vocabulary.tokens[token_id]: token_id for token_id in cut}
        self._search = TokenSearch(self._cut)
        self._model = replace(model, vocabulary=Vocabulary((), vocabulary.types, vocabulary.scores))
        self.decoder = model.normalization.decoder()
        self.special = frozenset(vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        done = 0
        for begin, end in self._search.find(text):
            token = text[begin:end]
            ids += [*self._stretch(text[done:begin]), self._cut[token]]
            swallowed = _SPACES.match(text, end) if token in self._model.rstrip else None
            done = swallowed.end() if swallowed else end
        ids += self._stretch(text[done:])
        if not add_special_tokens:
            return ids
        first, last = self._model.first, self._model.last
        return [*([] if first is None else [first]), *ids, *([] if last is None else [last])]

    def encode_marked(self, text: str, mark: str) -> list[int]:
        return encode_parts(self, text, mark)

    def _stretch(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text) if text else []
        return ids

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._size:
            return None
        text: str = self._texts.get(token_id) or self._processor.id_to_piece(token_id)
        return text

    def save(self, path: str) -> None:
        whole = self.whole()
        odd = _beyond_tokenizers(whole.vocabulary) if whole.algorithm == "bpe" else None
        if odd is not None:
            raise TokenizerError(f"the tokenizer cannot be written as tokenizer.json: a character of its piece {odd!r} is not a piece")
        TokenizersBackend(whole.in_tokenizers()).save(path)

    def whole(self) -> SentencePieceModel:
        """The model with its vocabulary."""
        tokens = [self.token(token_id) or "" for token_id in range(self._size)]
        return replace(self._model, vocabulary=replace(self._model.vocabulary, tokens=tokens))


def _beyond_tokenizers(vocabulary: Vocabulary) -> str | None:
    """A piece that only the library can join."""
    pieces = [vocabulary.tokens[token_id] for token_id in vocabulary.ids(TokenType.NORMAL, TokenType.UNUSED)]
    missing = set("".join(pieces)) - set(pieces)
    return next((piece for piece in pieces if not missing.isdisjoint(piece)), None)


def _model(vocabulary: Vocabulary, types: np.ndarray, prefix_space: bool) -> bytes:
    """A `ModelProto` (`sentencepiece_model.proto`), written as bytes: protobuf objects of a quarter of a million pieces take seconds.

    A piece is field 1 of the model, with its text (1), score (2) and type (3). Sizes are in two bytes, also where one would do.
    """
    text, lengths = _texts(vocabulary)
    if lengths.max() > _LONGEST:
        raise RuntimeError("a piece is too long")
    scores = np.asarray(vocabulary.scores, "<f4").view(np.uint8).reshape(-1, 4)
    before = _columns(0x0A, _varint(lengths + 3 + 7), 0x0A, _varint(lengths))
    after = _columns(0x15, scores, 0x18, types[:, None])
    counts = np.stack([np.full_like(lengths, before.shape[1]), lengths, np.full_like(lengths, after.shape[1])], axis=1)
    is_text = np.repeat(np.tile([False, True, False], len(lengths)), counts.reshape(-1))
    pieces = np.empty(len(is_text), np.uint8)
    pieces[is_text] = text
    pieces[~is_text] = np.concatenate([before, after], axis=1).reshape(-1)
    return pieces.tobytes() + _settings(TokenType.BYTE in vocabulary.types, prefix_space)


def _settings(byte_fallback: bool, prefix_space: bool) -> bytes:
    trainer = b"\x18\x02" + b"\x98\x02" + bytes([byte_fallback])  # model_type (3) is BPE; byte_fallback (35)
    normalizer = b"\x18" + bytes([prefix_space]) + b"\x20\x00"  # add_dummy_prefix (3); no remove_extra_whitespaces (4)
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


def _library_types(vocabulary: Vocabulary, special: TokenType) -> np.ndarray:
    """The types to give to the library: `special` for control tokens. Unknown types become control tokens, which are never parsed."""
    types = np.full(len(vocabulary.tokens), TokenType.CONTROL, np.uint8)
    for kind, given in _TYPES_FOR_LIBRARY.items():
        types[vocabulary.types == kind] = given
    types[vocabulary.types == TokenType.CONTROL] = special
    return types


_TYPES_FOR_LIBRARY = {
    TokenType.NORMAL: TokenType.NORMAL,
    TokenType.UNUSED: TokenType.NORMAL,
    TokenType.UNKNOWN: TokenType.UNKNOWN,
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
