"""SentencePiece vocabularies, BPE and unigram, as `tokenizers` models.

SentencePiece's BPE repeatedly joins the neighbours that make the piece with the best score, leftmost first. `tokenizers` ranks pairs
instead, so each pair that makes a piece gets a rank in the order of the scores (Kudo and Richardson 2018, `bpe_model.cc`; the ranking is
that of transformers' converters).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from .backend import frame_texts
from .vocab import TokenType, Vocabulary, pairs_that_make


@dataclass(frozen=True)
class SentencePieceModel:
    """Contents of a SentencePiece file."""

    vocabulary: Vocabulary
    """All tokens, with those that other files add."""
    algorithm: Literal["bpe", "unigram"]
    normalization: Normalization
    """Normalization of each text between special tokens."""
    first: int | None = None
    """Id before each text, or None."""
    last: int | None = None
    """Id after each text, or None."""
    rstrip: Collection[str] = ()
    """Tokens that strip the spaces after them."""

    def in_tokenizers(self) -> Tokenizer:
        """Return a `tokenizers.Tokenizer`, which can be saved as tokenizer.json; `SentencePieceBackend` is closer to SentencePiece."""
        tokenizer = build_sentencepiece(self.vocabulary, self.algorithm, self.normalization, rstrip=self.rstrip)
        frame_texts(tokenizer, self.first, self.last)
        return tokenizer


SPACE = "\u2581"


@dataclass(frozen=True)
class Normalization:
    """SentencePiece's normalization, applied to each text between special tokens."""

    prefix_space: bool = True
    """True if a space is added before the text."""
    strip_spaces: bool = False
    """True if spaces around the text are removed and runs of spaces collapsed."""
    charsmap: bytes = b""
    """SentencePiece's compiled table of replacements, such as nmt_nfkc; empty for none."""

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
"""Identity, for which a whole text is normalized like its parts between special tokens."""


def build_sentencepiece(
    vocabulary: Vocabulary,
    algorithm: Literal["bpe", "unigram"],
    normalization: Normalization,
    *,
    merges: Sequence[tuple[str, str]] | None = None,
    rstrip: Collection[str] = (),
) -> Tokenizer:
    """Build a tokenizer. `merges`, best first, default to those that the scores imply. Tokens in `rstrip` strip the spaces after them."""
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
    """Give user-defined runs of 2, 3, 4... spaces the best scores, longest first (Gemma has runs of up to 31).

    SentencePiece matches them after the replacement of spaces, including the prefix space, so they cannot be split off before.
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
    """Return pairs of pieces that make a piece, best score first."""
    scores = vocabulary.scores.tolist()
    ids = vocabulary.ids(TokenType.NORMAL, TokenType.UNUSED)
    ids.sort(key=scores.__getitem__, reverse=True)
    return pairs_that_make([vocabulary.tokens[token_id] for token_id in ids])


def _unigram(vocabulary: Vocabulary) -> models.Unigram:
    """Build a unigram model. Byte pieces get a score that never wins, because they are only for characters without a piece."""
    rows = list(zip(vocabulary.tokens, vocabulary.scores.tolist(), vocabulary.types.tolist(), strict=True))
    never = min((score for _, score, _ in rows), default=0.0) * 8 - 100.0
    pieces = [(token, never if kind == TokenType.BYTE else score) for token, score, kind in rows]
    return models.Unigram(pieces, vocabulary.unknown_id(), _has_bytes(vocabulary))


def _has_bytes(vocabulary: Vocabulary) -> bool:
    return TokenType.BYTE in vocabulary.types
