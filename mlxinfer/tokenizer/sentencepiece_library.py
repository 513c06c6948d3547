"""SentencePiece files, and SentencePiece's own library as a `Backend`.

The library joins characters without a piece, splits unused pieces again, and normalizes as in training; `tokenizers` supports none of
this. The library also needs scores only. `tokenizers` needs each pair of pieces that makes a piece: half a million for Gemma's 262,144
pieces, which take two seconds and 256 MB.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from ..errors import TokenizerError
from .backend import Backend, TokenizersBackend, encode_parts, tokenizer_errors
from .config_files import read_bytes
from .search import TokenSearch
from .sentencepiece import PLAIN, SPACE, Normalization, SentencePieceModel
from .vocab import CUT_OUT, TokenType, Vocabulary

_SPACES = re.compile(r"\s*")


_UNIGRAM, _BPE = 1, 2
_MAX_GAP = 100_000


def read_sentencepiece_model(
    path: Path, config: Mapping[str, Any], declared: Mapping[int, AddedToken]
) -> tuple[Backend, SentencePieceModel]:
    """Read a SentencePiece file. `config` is tokenizer_config.json, `declared` its added tokens by id. Raises `TokenizerError`."""
    proto = _parse(path)
    spec, normalizer = proto.trainer_spec, proto.normalizer_spec
    kind = spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"{path} is a SentencePiece model of a kind that is not supported ({kind})")
    if not normalizer.escape_whitespaces or spec.treat_whitespace_as_suffix:
        raise TokenizerError(f"{path} treats spaces in a way that is not supported")
    model = SentencePieceModel(
        _vocabulary(proto, declared),
        "unigram" if kind == _UNIGRAM else "bpe",
        Normalization(normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces, normalizer.precompiled_charsmap),
        # By default BPE models add BOS, and unigram models (T5) EOS.
        spec.bos_id if config.get("add_bos_token", kind == _BPE) and spec.bos_id >= 0 else None,
        spec.eos_id if config.get("add_eos_token", kind == _UNIGRAM) and spec.eos_id >= 0 else None,
        {token.content for token in declared.values() if token.rstrip},
    )
    with tokenizer_errors(f"building the tokenizer from {path}"):
        model.vocabulary.index()
        try:
            return backend_of_file(model, proto, declared), model
        except RuntimeError:  # refused by the library
            return TokenizersBackend(model.in_tokenizers()), model


def _parse(path: Path) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto: Any = schema.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(read_bytes(path))
    except DecodeError as error:
        raise TokenizerError(f"{path} is not a SentencePiece model, or is corrupt: {error}") from error
    if not proto.pieces:
        raise TokenizerError(f"{path} is not a SentencePiece model, or is corrupt: it has no pieces")
    return proto


def _vocabulary(proto: Any, declared: Mapping[int, AddedToken]) -> Vocabulary:
    tokens = [_text(piece) for piece in proto.pieces]
    types = [int(piece.type) for piece in proto.pieces]
    scores = [float(piece.score) for piece in proto.pieces]
    last = max(declared, default=-1)
    if last > len(tokens) + _MAX_GAP:
        raise TokenizerError(f"an added token has the id {last}, far beyond the {len(tokens)} pieces of the vocabulary")
    for token_id in range(len(tokens), last + 1):
        tokens.append(f"[EMPTY_{token_id}]")
        types.append(int(TokenType.UNUSED))
        scores.append(min(scores))
    for token_id, token in declared.items():
        tokens[token_id] = token.content
        if types[token_id] != TokenType.UNKNOWN:
            types[token_id] = int(TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
    return Vocabulary(tokens, np.array(types), np.array(scores))


def _text(piece: Any) -> str:
    """Return a piece's text; user-defined pieces have real spaces, because they are matched before the replacement."""
    text: str = piece.piece
    return text.replace(SPACE, " ") if piece.type == TokenType.USER_DEFINED else text


def backend_of_file(model: SentencePieceModel, proto: Any, declared: Collection[int]) -> SentencePieceBackend:
    """Return the backend of a file's `ModelProto`, which is modified. `declared` are ids that other files describe.

    The library matches user-defined pieces that are not declared. Raises `RuntimeError` as `SentencePieceBackend` does.
    """
    vocabulary = model.vocabulary
    ids = vocabulary.ids(TokenType.UNKNOWN, TokenType.CONTROL)
    ids += [token_id for token_id in vocabulary.ids(TokenType.USER_DEFINED) if token_id in declared]
    for token_id in ids:
        if token_id < len(proto.pieces) and proto.pieces[token_id].type != TokenType.UNKNOWN:
            proto.pieces[token_id].type = TokenType.CONTROL
    return SentencePieceBackend(model, proto.SerializeToString(), ids)


def backend_of_vocabulary(model: SentencePieceModel) -> SentencePieceBackend:
    """Return the backend of a BPE vocabulary with scores, the form of GGUF. Unused pieces count as used.

    Raises `RuntimeError` as `SentencePieceBackend` does.
    """
    vocabulary = model.vocabulary
    if model.normalization == PLAIN and not model.rstrip:
        # The library matches special tokens declared as user-defined, except the unknown token.
        return SentencePieceBackend(
            model, _model(vocabulary, _library_types(vocabulary, TokenType.USER_DEFINED), False), vocabulary.ids(TokenType.UNKNOWN)
        )
    types = _library_types(vocabulary, TokenType.CONTROL)
    ids = [token_id for token_id in vocabulary.ids(*CUT_OUT) if vocabulary.tokens[token_id].strip(SPACE + " ")]
    types[[token_id for token_id in ids if types[token_id] != TokenType.UNKNOWN]] = TokenType.CONTROL
    return SentencePieceBackend(model, _model(vocabulary, types, model.normalization.prefix_space), ids)


class SentencePieceBackend:
    """Implements `Backend`.

    Raises `RuntimeError` for a vocabulary that the library refuses: with two equal pieces, an incomplete set of bytes, or not exactly one
    unknown token.
    """

    def __init__(self, model: SentencePieceModel, serialized: bytes, cut: Collection[int]) -> None:
        """Create a backend of a serialized `ModelProto`. Tokens with ids in `cut` are matched before the library is called."""
        from sentencepiece import SentencePieceProcessor  # lazy: few models need it

        vocabulary = model.vocabulary
        self._processor = SentencePieceProcessor(model_proto=serialized)
        self._in_library: int = self._processor.get_piece_size()
        self._size = len(vocabulary.tokens)
        # The library has all other texts.
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
        """Model with its vocabulary."""
        tokens = [self.token(token_id) or "" for token_id in range(self._size)]
        return replace(self._model, vocabulary=replace(self._model.vocabulary, tokens=tokens))


def _beyond_tokenizers(vocabulary: Vocabulary) -> str | None:
    """Return a piece that only the library can join; None if all are supported by `tokenizers`."""
    pieces = [vocabulary.tokens[token_id] for token_id in vocabulary.ids(TokenType.NORMAL, TokenType.UNUSED)]
    missing = set("".join(pieces)) - set(pieces)
    return next((piece for piece in pieces if not missing.isdisjoint(piece)), None)


def _model(vocabulary: Vocabulary, types: np.ndarray, prefix_space: bool) -> bytes:
    """Serialize a `ModelProto` (`sentencepiece_model.proto`) directly, because 250,000 protobuf objects take seconds.

    A piece is field 1 of the model, with text (1), score (2) and type (3). All sizes have two bytes.
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
    return pieces.tobytes() + _normalizer_settings(TokenType.BYTE in vocabulary.types, prefix_space)


def _normalizer_settings(byte_fallback: bool, prefix_space: bool) -> bytes:
    trainer = b"\x18\x02" + b"\x98\x02" + bytes([byte_fallback])  # model_type (3) is BPE; byte_fallback (35)
    normalizer = b"\x18" + bytes([prefix_space]) + b"\x20\x00"  # add_dummy_prefix (3); no remove_extra_whitespaces (4)
    return b"\x12" + bytes([len(trainer)]) + trainer + b"\x1a" + bytes([len(normalizer)]) + normalizer


_LONGEST = (1 << 14) - 11
"""Maximum bytes of a text whose piece size fits in two bytes of seven bits."""


def _texts(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Return the UTF-8 of all pieces, uint8, and their lengths in bytes, int64. One call encodes all pieces, separated by zeros."""
    tokens = list(vocabulary.tokens)
    for token_id in vocabulary.ids(*CUT_OUT):
        tokens[token_id] = tokens[token_id].replace(" ", SPACE)
    joined = np.frombuffer("\0".join([*tokens, ""]).encode(), np.uint8)
    ends = np.flatnonzero(joined == 0)
    if len(ends) != len(tokens):
        raise RuntimeError("a piece has a zero in it")
    return joined[joined != 0], np.diff(ends, prepend=-1) - 1


def _library_types(vocabulary: Vocabulary, special: TokenType) -> np.ndarray:
    """Return the library's types, with `special` for control tokens. Unknown types become control tokens, which are never parsed."""
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
    """Return varints, uint8 `[n, 2]`: seven bits per byte, low bits first; the eighth bit marks continuation."""
    return np.stack([values & 0x7F | 0x80, values >> 7], axis=1).astype(np.uint8)


def _columns(*parts: int | np.ndarray) -> np.ndarray:
    """Concatenate columns of bytes; a number is repeated in each row."""
    rows = max(len(part) for part in parts if isinstance(part, np.ndarray))
    return np.concatenate([np.full((rows, 1), part, np.uint8) if isinstance(part, int) else part for part in parts], axis=1)
