"""A SentencePiece `tokenizer.model`, and the tokens that the JSON files beside it add."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from ..errors import TokenizerError
from .library import frame_texts, tokenizer_errors
from .sentencepiece import SPACE, Normalization, build_sentencepiece
from .vocabulary import TokenType, Vocabulary

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
    """User-defined pieces are looked for in the raw text, where a space is a space."""
    text: str = piece.piece
    return text.replace(SPACE, " ") if piece.type == TokenType.USER_DEFINED else text
