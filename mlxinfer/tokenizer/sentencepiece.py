"""SentencePiece vocabularies, BPE and unigram, as `tokenizers` models.

SentencePiece's BPE joins, wherever it stands, the pair of neighbours whose joined text is the piece with the best score, the
leftmost first. `tokenizers` ranks pairs instead, so a rank is given to every pair that makes a piece, in the order of the scores
(Kudo and Richardson 2018, `bpe_model.cc`; the ranking is that of transformers' converters).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from ..errors import TokenizerError
from .backend import TokenizersBackend, frame_texts, tokenizer_errors
from .vocab import CUT_OUT, TokenType, Vocabulary, pairs_that_make

_UNIGRAM, _BPE = 1, 2
_MAX_GAP = 100_000


def read_sentencepiece_model(path: Path, config: Mapping[str, Any], declared: Mapping[int, AddedToken]) -> Tokenizer:
    """`config` is tokenizer_config.json. Raises `TokenizerError`."""
    proto = _parse(path)
    spec, normalizer = proto.trainer_spec, proto.normalizer_spec
    kind = spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"{path} is a SentencePiece model of a kind that is not supported ({kind})")
    if not normalizer.escape_whitespaces or spec.treat_whitespace_as_suffix:
        raise TokenizerError(f"{path} treats spaces in a way that is not supported")
    normalization = Normalization(normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces, normalizer.precompiled_charsmap)
    rstrip = {token.content for token in declared.values() if token.rstrip}
    with tokenizer_errors(f"building the tokenizer from {path}"):
        vocabulary = _vocabulary(proto, declared)
        backend = build_sentencepiece(vocabulary, "unigram" if kind == _UNIGRAM else "bpe", normalization, rstrip=rstrip)
        # BPE models begin with BOS, unigram ones (T5) end with EOS, unless tokenizer_config says otherwise
        first = spec.bos_id if config.get("add_bos_token", kind == _BPE) and spec.bos_id >= 0 else None
        last = spec.eos_id if config.get("add_eos_token", kind == _UNIGRAM) and spec.eos_id >= 0 else None
        frame_texts(backend, first, last)
    return backend


def _parse(path: Path) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto: Any = schema.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
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
    """User-defined pieces are searched for in the raw text, before spaces are replaced."""
    text: str = piece.piece
    return text.replace(SPACE, " ") if piece.type == TokenType.USER_DEFINED else text


SPACE = "\u2581"


@dataclass(frozen=True)
class Normalization:
    """What SentencePiece does to a text before it is cut. Each stretch between special tokens counts as one text."""

    prefix_space: bool = True
    """Whether a space is put before the text."""
    strip_spaces: bool = False
    """Whether spaces around the text, and all but one of each run, are removed."""
    charsmap: bytes = b""
    """SentencePiece's compiled table of replacements (nmt_nfkc and the like); empty for none."""

    def normalizer(self) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.strip_spaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.prefix_space:
            steps.append(normalizers.Prepend(SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def decoder(self) -> decoders.Decoder:
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if self.prefix_space else steps)


PLAIN = Normalization(prefix_space=False)
"""Leaves texts alone, so a whole text is normalized like its parts between special tokens."""


def build_sentencepiece(
    vocabulary: Vocabulary,
    algorithm: Literal["bpe", "unigram"],
    normalization: Normalization,
    *,
    merges: Sequence[tuple[str, str]] | None = None,
    rstrip: Collection[str] = (),
) -> Tokenizer:
    """`merges`, best first, where the file has them; else they follow from the scores. Tokens in `rstrip` swallow the spaces after them."""
    vocabulary = _with_plain_space_runs(vocabulary)
    if algorithm == "unigram":
        tokenizer = Tokenizer(_unigram(vocabulary))
    else:
        tokenizer = Tokenizer(_bpe(vocabulary, _merges(vocabulary) if merges is None else merges))
    tokenizer.normalizer = normalization.normalizer()
    tokenizer.decoder = normalization.decoder()
    tokenizer.add_tokens(vocabulary.added_tokens(rstrip))
    return tokenizer


def _with_plain_space_runs(vocabulary: Vocabulary) -> Vocabulary:
    """Make user-defined runs of 2, 3, 4... spaces pieces that beat every other, longest first (Gemma has them up to 31).

    They are matched after spaces were replaced, the one of the prefix included, so they cannot be cut out beforehand.
    """
    tokens, types, scores = list(vocabulary.tokens), vocabulary.types.copy(), vocabulary.scores.copy()
    defined = vocabulary.ids(TokenType.USER_DEFINED)
    runs = {token_id: len(tokens[token_id]) for token_id in defined if not tokens[token_id].strip(SPACE + " ")}
    if sorted(runs.values()) != list(range(2, len(runs) + 2)):
        return vocabulary
    for token_id, length in runs.items():
        tokens[token_id], types[token_id] = SPACE * length, TokenType.NORMAL
        if len(scores):
            scores[token_id] = length
    return Vocabulary(tokens, types, scores)


def _bpe(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]) -> models.BPE:
    unknown = vocabulary.unknown_id()
    unknown_token = None if unknown is None else vocabulary.tokens[unknown]
    return models.BPE(vocabulary.index(), merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=_has_bytes(vocabulary))


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, best score first."""
    scores = vocabulary.scores.tolist()
    ids = vocabulary.ids(TokenType.NORMAL, TokenType.UNUSED)
    ids.sort(key=scores.__getitem__, reverse=True)
    return pairs_that_make([vocabulary.tokens[token_id] for token_id in ids])


def _unigram(vocabulary: Vocabulary) -> models.Unigram:
    """Byte pieces are for characters that no piece covers, so they get a score that never wins against their own text."""
    rows = list(zip(vocabulary.tokens, vocabulary.scores.tolist(), vocabulary.types.tolist(), strict=True))
    never = min((score for _, score, _ in rows), default=0.0) * 8 - 100.0
    pieces = [(token, never if kind == TokenType.BYTE else score) for token, score, kind in rows]
    return models.Unigram(pieces, vocabulary.unknown_id(), _has_bytes(vocabulary))


def _has_bytes(vocabulary: Vocabulary) -> bool:
    return TokenType.BYTE in vocabulary.types


class SentencePieceBackend:
    """SentencePiece's own library as a `Backend`, for a vocabulary with scores, normalized as `PLAIN`.

    Its BPE needs scores only, while `tokenizers` needs every pair of pieces that makes a piece: for the 262,144 pieces of Gemma these
    are half a million, which take two seconds and a quarter of a gigabyte.

    `first` and `last` are the ids that stand around every text. Special tokens in a text are parsed: the library is told that they are
    user-defined symbols. Raises `RuntimeError` for a vocabulary that the library refuses: one with two equal pieces, with some bytes
    only, or without exactly one unknown token.
    """

    def __init__(self, vocabulary: Vocabulary, first: int | None, last: int | None) -> None:
        from sentencepiece import SentencePieceProcessor  # few models need it

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
        """The same tokenizer as a `tokenizers.Tokenizer`, which can be written as tokenizer.json."""
        tokens = [self._cut_out.get(token_id) or self._text(token_id) for token_id in range(len(self._types))]
        tokenizer = build_sentencepiece(Vocabulary(tokens, self._types, self._scores), "bpe", PLAIN)
        frame_texts(tokenizer, self._first, self._last)
        return tokenizer

    def _text(self, token_id: int) -> str:
        text: str = self._processor.id_to_piece(token_id)
        return text


def _model(vocabulary: Vocabulary) -> bytes:
    """A `ModelProto` (`sentencepiece_model.proto`), written as bytes: protobuf objects of a quarter of a million pieces take seconds.

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
    """The types to give to the library: special tokens as user-defined symbols, unknown types as control tokens, which are never parsed."""
    types = np.full(len(vocabulary.tokens), TokenType.CONTROL, np.uint8)
    for kind, given in _TYPES_FOR_LIBRARY.items():
        types[vocabulary.types == kind] = given
    return types


_TYPES_FOR_LIBRARY = {
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
