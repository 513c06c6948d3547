"""SentencePiece vocabularies, BPE and unigram, as `tokenizers` models.

SentencePiece's BPE joins, wherever it stands, the pair of neighbours whose joined text is the piece with the best score, the
leftmost first. `tokenizers` ranks pairs instead, so a rank is given to every pair that makes a piece, in the order of the scores
(Kudo and Richardson 2018, `bpe_model.cc`; the ranking is that of transformers' converters).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from .vocabulary import TokenType, Vocabulary

SPACE = "\u2581"


@dataclass(frozen=True)
class Normalization:
    """What SentencePiece does to a text before it is cut: each stretch between special tokens is one text.

    `charsmap` is its compiled table of replacements (nmt_nfkc and the like), empty for none.
    """

    prefix_space: bool = True
    strip_spaces: bool = False
    charsmap: bytes = b""

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
"""With this one, a text in one piece is the same as cut at its special tokens."""


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
    """Pairs of pieces that make a piece, best score first; of one piece, the longest left side first.

    Where two such pairs overlap, as in a run of one character, the left one is the one with the longer left side.
    """
    tokens, scores = vocabulary.tokens, vocabulary.scores.tolist()
    ids = vocabulary.ids(TokenType.NORMAL, TokenType.UNUSED)
    pieces = {tokens[token_id] for token_id in ids}
    ids.sort(key=scores.__getitem__, reverse=True)
    return [
        (piece[:cut], piece[cut:])
        for piece in map(tokens.__getitem__, ids)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _unigram(vocabulary: Vocabulary) -> models.Unigram:
    """Byte pieces are for characters that no piece covers, so they get a score that never wins against their own text."""
    rows = list(zip(vocabulary.tokens, vocabulary.scores.tolist(), vocabulary.types.tolist(), strict=True))
    never = min((score for _, score, _ in rows), default=0.0) * 8 - 100.0
    pieces = [(token, never if kind == TokenType.BYTE else score) for token, score, kind in rows]
    return models.Unigram(pieces, vocabulary.unknown_id(), _has_bytes(vocabulary))


def _has_bytes(vocabulary: Vocabulary) -> bool:
    return TokenType.BYTE in vocabulary.types
