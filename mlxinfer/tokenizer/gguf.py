"""Reads the tokenizer in a GGUF file's metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Defaults of missing keys are llama.cpp's (`llama_vocab::impl::load`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import TokenizerError
from ..util.typed_reader import TypedReader
from .backend import DEFAULT_TEMPLATE, Backend, TokenizerParts, TokenizersBackend, frame_texts, tokenizer_errors
from .byte_level import ByteLevelBackend, WrittenMerges
from .pretokenizers import PreTokenization, pre_tokenization
from .vocab import TokenType, Vocabulary, split_merges

_END_OF_TURN = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
        *("<|calls|>", "<|flush|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
"""Control tokens that end a turn. Many files name only one of the several that a model uses."""

_LLAMA, _GPT2, _GEMMA4 = "llama", "gpt2", "gemma4"
"""Values of `tokenizer.ggml.model`: SentencePiece BPE with scores, byte-level BPE, and merges over raw text with spaces replaced."""


class TokenizerMetadata(TypedReader):
    """Typed reader of the keys `tokenizer.*`. Raises `TokenizerError`."""

    def error(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"the GGUF file is corrupt: {key} {what}")

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool; some writers store a number."""
        value = self.take(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, int):
            raise self.bad(f"tokenizer.ggml.{name}", value, "true or false")
        return bool(value)

    def strings(self, name: str, prefix: str = "tokenizer.ggml.") -> list[str] | None:
        values = self.take(prefix + name)
        if values is not None and (not isinstance(values, list) or set(map(type, values)) - {str}):
            raise self.error(prefix + name, "is not an array of strings")
        return values

    def numbers(self, name: str, length: int) -> np.ndarray | None:
        """Return one number per token; None without the key."""
        given = self.take(f"tokenizer.ggml.{name}")
        if given is None:
            return None
        if not isinstance(given, np.ndarray) and not (isinstance(given, list) and all(isinstance(value, (int, float)) for value in given)):
            raise self.error(f"tokenizer.ggml.{name}", "is not an array of numbers")
        if len(given) != length:
            raise self.error(f"tokenizer.ggml.{name}", f"has {len(given)} values for {length} tokens")
        return np.asarray(given)

    def token_id(self, name: str, vocabulary_size: int, default: int | None = None) -> int | None:
        """Return a special token's id; None without the key or for an id outside the vocabulary."""
        token_id = self.optional_integer(f"tokenizer.ggml.{name}_token_id", default, low=-math.inf, high=math.inf)
        return token_id if token_id is not None and 0 <= token_id < vocabulary_size else None


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Return the tokenizer in a GGUF file's metadata. Raises `TokenizerError`."""
    keys = TokenizerMetadata(metadata)
    model = keys.optional_text("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError("the GGUF file has no tokenizer (tokenizer.ggml.model)")
    if model not in (_LLAMA, _GPT2, _GEMMA4):
        raise TokenizerError(f"the GGUF file has a tokenizer of the kind {model!r}, which is not supported")
    is_llama = model == _LLAMA
    vocabulary = _vocabulary(keys, is_llama)
    size = len(vocabulary.tokens)
    bos, eos = keys.token_id("bos", size, 1 if is_llama else None), keys.token_id("eos", size, 2 if is_llama else None)
    pre = pre_tokenization(keys.text("tokenizer.ggml.pre", "default")) if model == _GPT2 else None
    # Gemma 4 needs BOS, although its files deny it.
    first = bos if keys.flag("add_bos_token", pre.add_bos if pre else is_llama) or model == _GEMMA4 else None
    last = eos if keys.flag("add_eos_token", False) else None
    with tokenizer_errors("building the tokenizer of the GGUF file"):
        backend = _build(keys, pre, vocabulary, first, last, is_llama)
    named = {"bos_token": bos, "eos_token": eos, "unk_token": keys.token_id("unknown", size, 0 if is_llama else None)}
    named["pad_token"] = keys.token_id("padding", size)
    return TokenizerParts(
        backend,
        size,
        bos,
        frozenset(_end_of_turn(keys, vocabulary, eos)),
        {name: vocabulary.tokens[token_id] for name, token_id in named.items() if token_id is not None},
        _chat_templates(keys),
    )


def _vocabulary(keys: TokenizerMetadata, is_llama: bool) -> Vocabulary:
    tokens = keys.strings("tokens")
    if not tokens:
        raise TokenizerError("the GGUF file is corrupt: it has no tokens (tokenizer.ggml.tokens)")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    types = keys.numbers("token_type", len(tokens))
    types = np.full(len(tokens), TokenType.NORMAL) if types is None else types
    if is_llama and TokenType.UNKNOWN not in types:
        unknown = keys.token_id("unknown", len(tokens), 0)
        if unknown is not None:
            types = types.copy()
            types[unknown] = TokenType.UNKNOWN
    scores = keys.numbers("scores", len(tokens))
    return Vocabulary(tokens, types, np.array([]) if scores is None else scores)


def _build(
    keys: TokenizerMetadata, pre: PreTokenization | None, vocabulary: Vocabulary, first: int | None, last: int | None, is_llama: bool
) -> Backend:
    if pre is None:
        return _build_sentencepiece(keys, vocabulary, first, last, is_llama)
    return ByteLevelBackend(vocabulary, WrittenMerges(_merges(keys)), pre, first, last)


def _build_sentencepiece(keys: TokenizerMetadata, vocabulary: Vocabulary, first: int | None, last: int | None, is_llama: bool) -> Backend:
    from .sentencepiece import PLAIN, Normalization, SentencePieceModel, build_sentencepiece  # lazy: byte-level models do not need it

    if not is_llama:
        tokenizer = build_sentencepiece(vocabulary, "bpe", PLAIN, merges=split_merges(_merges(keys)))
        frame_texts(tokenizer, first, last)
        return TokenizersBackend(tokenizer)
    if not len(vocabulary.scores):
        raise TokenizerError("the GGUF file is corrupt: its tokenizer has no scores (tokenizer.ggml.scores)")
    normalization = Normalization(keys.flag("add_space_prefix", True))
    model = SentencePieceModel(vocabulary, "bpe", normalization, first, last, _right_stripped(keys, vocabulary))
    from .sentencepiece_library import backend_of_vocabulary

    # `tokenizers` accepts a vocabulary that SentencePiece refuses, or reports the fault.
    with suppress(RuntimeError):
        return backend_of_vocabulary(model)
    return TokenizersBackend(model.in_tokenizers())


def _merges(keys: TokenizerMetadata) -> list[str]:
    merges = keys.strings("merges")
    if merges is None:
        raise TokenizerError("the GGUF file is corrupt: its tokenizer has no merges (tokenizer.ggml.merges)")
    return merges


def _right_stripped(keys: TokenizerMetadata, vocabulary: Vocabulary) -> frozenset[str]:
    """Return the special tokens that strip the spaces after them: Phi-3's. GGUF has no key for this, so the model's name decides."""
    name = keys.text("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = {token.content for token in vocabulary.added_tokens()} | {"</s>"}
    return frozenset(special - {"<unk>", "<s>", "<|endoftext|>"})


def _end_of_turn(keys: TokenizerMetadata, vocabulary: Vocabulary, eos: int | None) -> set[int]:
    size = len(vocabulary.tokens)
    by_text = {}
    for token_id in vocabulary.ids(TokenType.CONTROL, TokenType.USER_DEFINED):
        token = vocabulary.tokens[token_id]
        # "</s>" is plain text in Gemma (strike-through)
        if token in _END_OF_TURN and (token != "</s>" or vocabulary.types[token_id] == TokenType.CONTROL):
            by_text[token] = token_id
    if {"<|return|>", "<|call|>"} <= by_text.keys() or {"<|calls|>", "<|flush|>"} <= by_text.keys():
        by_text.pop("<|end|>", None)
    several = keys.take("tokenizer.ggml.eos_token_ids")  # a key of Ollama's
    named = {eos, keys.token_id("eot", size), keys.token_id("eom", size)}
    if isinstance(several, np.ndarray) and several.dtype.kind in "iu":
        named |= {int(token_id) for token_id in several if 0 <= token_id < size}
    return {token_id for token_id in {*named, *by_text.values()} if token_id is not None}


def _chat_templates(keys: TokenizerMetadata) -> dict[str, str]:
    templates = {}
    for name in [DEFAULT_TEMPLATE, *(keys.strings("chat_templates", "tokenizer.") or ())]:
        key = "tokenizer.chat_template" if name == DEFAULT_TEMPLATE else f"tokenizer.chat_template.{name}"
        template = keys.optional_text(key)
        if template is not None:
            templates[name] = template
    return templates
