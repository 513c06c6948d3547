"""Byte-level BPE from a vocabulary, merges and the name of a pre-tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models

from ..errors import TokenizerError
from .pretokenizers import PreTokenization
from .vocabulary import Vocabulary


def build_byte_level(vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenization) -> Tokenizer:
    """`merges` are pairs joined by a space, best first."""
    model = models.BPE(vocabulary.index(), split_merges(merges), ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens())
    return tokenizer


def split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """A merge's left side is never empty, so the space that parts the two is not the first character."""
    halves = [merge.partition(" ")[::2] for merge in merges]
    if all(map(all, halves)):
        return halves
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)
        if at < 0 or at == len(merge) - 1:
            raise TokenizerError(f"the vocabulary is corrupt: {merge!r} is not a merge of two tokens")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs
