"""The tokenizer in a GGUF file's metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Defaults where a key is missing are llama.cpp's
(`llama_vocab::impl::load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import TokenizerError
from .backend import DEFAULT_TEMPLATE, Backend, LibraryBackend, TokenizerParts, frame_texts, tokenizer_errors
from .pretokenizers import pre_tokenization
from .sentencepiece import PLAIN, Normalization, build_sentencepiece
from .vocab import TokenType, Vocabulary, build_byte_level, split_merges

_END_OF_TURN = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
        *("<|calls|>", "<|flush|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
"""Texts of control tokens that end a turn. Many files name only one, and models use several."""

_RAW_TEXT_BPE = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Pre-tokenizers that are none: merges run over the whole text, with spaces replaced as SentencePiece does."""


@dataclass(frozen=True)
class _Kind:
    """Defaults of a `tokenizer.ggml.model`."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    add_eos: bool = False


_KINDS = {
    "llama": _Kind(bos=1, eos=2, unknown=0, add_bos=True),
    "gpt2": _Kind(),
    "gemma4": _Kind(add_bos=True),
    "t5": _Kind(eos=1, unknown=2, add_eos=True),
}


class _Metadata:
    """Typed access to the tokenizer's keys."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        value = self._metadata.get(key, default)
        if value is not None and not isinstance(value, kind):
            raise TokenizerError(f"the GGUF file is corrupt: {key} is {type(value).__name__}, not {kind.__name__}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.get(f"tokenizer.ggml.{name}", int, default))

    def array(self, name: str) -> Any:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if values is not None and (isinstance(values, str) or not hasattr(values, "__len__")):
            raise TokenizerError(f"the GGUF file is corrupt: tokenizer.ggml.{name} is not an array")
        return values

    def strings(self, name: str) -> list[str] | None:
        values = self.array(name)
        if values is not None and set(map(type, values)) - {str}:
            raise TokenizerError(f"the GGUF file is corrupt: tokenizer.ggml.{name} is not an array of strings")
        return None if values is None else list(values)

    def numbers(self, name: str, length: int | None = None) -> np.ndarray | None:
        given = self.array(name)
        if given is None:
            return None
        if not isinstance(given, np.ndarray) and not all(isinstance(value, (int, float)) for value in given):
            raise TokenizerError(f"the GGUF file is corrupt: tokenizer.ggml.{name} is not an array of numbers")
        values = np.asarray(given)
        if length is not None and len(values) != length:
            raise TokenizerError(f"the GGUF file is corrupt: tokenizer.ggml.{name} has {len(values)} values for {length} tokens")
        return values

    def token_id(self, name: str, vocabulary_size: int, default: int | None = None) -> int | None:
        """A special token's id; an id out of the vocabulary is as good as none."""
        token_id = self.get(f"tokenizer.ggml.{name}_token_id", int, default)
        return token_id if token_id is not None and 0 <= token_id < vocabulary_size else None


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Raises `TokenizerError`."""
    keys = _Metadata(metadata)
    model = keys.get("tokenizer.ggml.model", str)
    if model is None:
        raise TokenizerError("the GGUF file has no tokenizer (tokenizer.ggml.model)")
    if model not in _KINDS:
        raise TokenizerError(f"the GGUF file has a tokenizer of the kind {model!r}, which is not supported")
    kind = _KINDS[model]
    vocabulary = _vocabulary(keys, kind)
    size = len(vocabulary.tokens)
    pre = keys.get("tokenizer.ggml.pre", str, "default")
    bos, eos = keys.token_id("bos", size, kind.bos), keys.token_id("eos", size, kind.eos)
    add_bos = pre_tokenization(pre).add_bos if model == "gpt2" and pre not in _RAW_TEXT_BPE else kind.add_bos
    # Gemma 4's files say that it wants no BOS, and it does
    first = bos if keys.flag("add_bos_token", add_bos) or model == "gemma4" else None
    last = eos if keys.flag("add_eos_token", kind.add_eos) else None
    with tokenizer_errors("building the tokenizer of the GGUF file"):
        backend = _build(keys, model, pre, vocabulary, first, last)
    named = {"bos_token": bos, "eos_token": eos, "unk_token": keys.token_id("unknown", size, kind.unknown)}
    named["pad_token"] = keys.token_id("padding", size)
    return TokenizerParts(
        backend,
        size,
        bos,
        frozenset(_end_of_turn(keys, vocabulary, eos)),
        {name: vocabulary.tokens[token_id] for name, token_id in named.items() if token_id is not None},
        _chat_templates(keys),
    )


def _vocabulary(keys: _Metadata, kind: _Kind) -> Vocabulary:
    tokens = keys.strings("tokens")
    if not tokens:
        raise TokenizerError("the GGUF file is corrupt: it has no tokens (tokenizer.ggml.tokens)")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    types = keys.numbers("token_type", len(tokens))
    types = np.full(len(tokens), TokenType.NORMAL) if types is None else types.copy()
    if kind.unknown is not None and TokenType.UNKNOWN not in types:
        unknown = keys.token_id("unknown", len(tokens), kind.unknown)
        if unknown is not None:
            types[unknown] = TokenType.UNKNOWN
    scores = keys.numbers("scores", len(tokens))
    return Vocabulary(tokens, types, np.array([]) if scores is None else scores)


def _build(keys: _Metadata, model: str, pre: str, vocabulary: Vocabulary, first: int | None, last: int | None) -> Backend:
    if model == "gpt2" and pre not in _RAW_TEXT_BPE:
        tokenizer = build_byte_level(vocabulary, _merges(keys), pre_tokenization(pre))
    elif model in ("gpt2", "gemma4"):
        tokenizer = build_sentencepiece(vocabulary, "bpe", PLAIN, merges=split_merges(_merges(keys)))
    elif not len(vocabulary.scores):
        raise TokenizerError("the GGUF file is corrupt: its tokenizer has no scores (tokenizer.ggml.scores)")
    else:
        normalization, rstrip = _normalization(keys, model), _right_stripped(keys, vocabulary)
        if model == "llama" and normalization == PLAIN and not rstrip:
            from .sentencepiece_backend import SentencePieceBackend  # imports a library that few models need

            # What that library does not take is for the other one to take, or to say what is wrong with it.
            with suppress(RuntimeError):
                return SentencePieceBackend(vocabulary, first, last)
        tokenizer = build_sentencepiece(vocabulary, "bpe" if model == "llama" else "unigram", normalization, rstrip=rstrip)
    frame_texts(tokenizer, first, last)
    return LibraryBackend(tokenizer)


def _normalization(keys: _Metadata, model: str) -> Normalization:
    charsmap = keys.numbers("precompiled_charsmap")
    return Normalization(
        prefix_space=keys.flag("add_space_prefix", model == "llama"),
        strip_spaces=keys.flag("remove_extra_whitespaces", False),
        charsmap=b"" if charsmap is None else bytes(int(value) % 256 for value in charsmap.tolist()),
    )


def _merges(keys: _Metadata) -> list[str]:
    merges = keys.strings("merges")
    if merges is None:
        raise TokenizerError("the GGUF file is corrupt: its tokenizer has no merges (tokenizer.ggml.merges)")
    return merges


def _right_stripped(keys: _Metadata, vocabulary: Vocabulary) -> frozenset[str]:
    """Phi-3's special tokens swallow the spaces after them; GGUF has no key for that, so the name has to tell."""
    name = keys.get("general.name", str, "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    special = {token.content for token in vocabulary.added_tokens()} | {"</s>"}
    return frozenset(special - {"<unk>", "<s>", "<|endoftext|>"})


def _end_of_turn(keys: _Metadata, vocabulary: Vocabulary, eos: int | None) -> set[int]:
    size = len(vocabulary.tokens)
    by_text = {}
    for token_id in vocabulary.ids(TokenType.CONTROL, TokenType.USER_DEFINED):
        token = vocabulary.tokens[token_id]
        # "</s>" is strike-through text in Gemma, where it is not a control token
        if token in _END_OF_TURN and (token != "</s>" or vocabulary.types[token_id] == TokenType.CONTROL):
            by_text[token] = token_id
    if {"<|return|>", "<|call|>"} <= by_text.keys() or {"<|calls|>", "<|flush|>"} <= by_text.keys():
        by_text.pop("<|end|>", None)
    named = {eos, keys.token_id("eot", size), keys.token_id("eom", size)}
    return {token_id for token_id in {*named, *by_text.values()} if token_id is not None}


def _chat_templates(keys: _Metadata) -> dict[str, str]:
    templates = {}
    names = keys.get("tokenizer.chat_templates", object) or []
    for name in [DEFAULT_TEMPLATE, *(str(name) for name in names)]:
        key = "tokenizer.chat_template" if name == DEFAULT_TEMPLATE else f"tokenizer.chat_template.{name}"
        template = keys.get(key, str)
        if template is not None:
            templates[name] = template
    return templates
