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
from .backend import Backend, TokenizersBackend, frame_texts, tokenizer_errors
from .config_files import read_bytes
from .vocab import TokenType, Vocabulary, pairs_that_make

_UNIGRAM, _BPE = 1, 2
_MAX_GAP = 100_000


@dataclass(frozen=True)
class SentencePieceModel:
    """A tokenizer, as a file has it."""

    vocabulary: Vocabulary
    """All tokens, those included that other files add."""
    algorithm: Literal["bpe", "unigram"]
    """Algorithm that finds pieces."""
    normalization: Normalization
    """Normalization of each stretch of a text."""
    first: int | None = None
    """The id before every text."""
    last: int | None = None
    """The id after every text."""
    rstrip: Collection[str] = ()
    """Tokens that swallow the spaces after them."""

    def in_tokenizers(self) -> Tokenizer:
        """As a `tokenizers.Tokenizer`, which can be written as tokenizer.json; `SentencePieceBackend` is closer to SentencePiece."""
        tokenizer = build_sentencepiece(self.vocabulary, self.algorithm, self.normalization, rstrip=self.rstrip)
        frame_texts(tokenizer, self.first, self.last)
        return tokenizer


def read_sentencepiece_model(
    path: Path, config: Mapping[str, Any], declared: Mapping[int, AddedToken]
) -> tuple[Backend, SentencePieceModel]:
    """`config` is tokenizer_config.json. Raises `TokenizerError`."""
    from .sentencepiece_library import backend_of_file  # imports this

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
        # BPE models begin with BOS, unigram ones (T5) end with EOS, unless tokenizer_config says otherwise
        spec.bos_id if config.get("add_bos_token", kind == _BPE) and spec.bos_id >= 0 else None,
        spec.eos_id if config.get("add_eos_token", kind == _UNIGRAM) and spec.eos_id >= 0 else None,
        {token.content for token in declared.values() if token.rstrip},
    )
    with tokenizer_errors(f"building the tokenizer from {path}"):
        model.vocabulary.index()
        try:
            return backend_of_file(model, proto, declared), model
        except RuntimeError:  # the library refuses it
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
