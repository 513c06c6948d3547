"""A tokenizer with a token for each byte, some for whole words, and special tokens: it can write any text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxinfer.tokenizer.backend import DEFAULT_TEMPLATE, TokenizerParts, TokenizersBackend
from mlxinfer.tokenizer.tokenizer import Tokenizer as OwnTokenizer

SPECIAL = ("<s>", "</s>", "<|mark|>")
WORDS = ("\n\n", "call", " call", "}\n", '": "')


@cache
def byte_tokenizer(words: Sequence[str] = WORDS, template: str = "") -> OwnTokenizer:
    """`words` are tokens as well, though not special ones; "</s>" ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    size = 256 + len(SPECIAL) + len(words)
    ids = {token: backend.token_to_id(token) for token in SPECIAL}
    templates = {DEFAULT_TEMPLATE: template} if template else {}
    return OwnTokenizer(TokenizerParts(TokenizersBackend(backend), size, ids["<s>"], frozenset([ids["</s>"]]), {}, templates))
