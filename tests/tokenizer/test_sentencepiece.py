"""Tokenizers built from SentencePiece models, against the SentencePiece library itself."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as schema
from support.processes.examples import examples
from support.tokenizers.golden_tokenizers import golden

from mlxinfer.errors import TokenizerError
from mlxinfer.tokenizer import Tokenizer, from_directory, from_gguf
from mlxinfer.tokenizer.vocab import TokenType

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "no prefix": {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False, "user_defined_symbols": ["<t>"]},
    "nmt": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
    "folded case": {"model_type": "bpe", "normalization_rule_name": "nfkc_cf"},
    "symbols": {"model_type": "bpe", "user_defined_symbols": ["<t>", "ab", "日本"], "control_symbols": ["<c>"]},
    "runs of spaces": {"model_type": "bpe", "allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False, "byte_fallback": True},
    "digits": {"model_type": "bpe", "split_digits": True, "byte_fallback": True},
    "phrases": {"model_type": "bpe", "split_by_whitespace": False, "byte_fallback": True},
    "rare characters": {"model_type": "bpe", "character_coverage": 0.98},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "unigram bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
}
TEXTS = st.text(st.sampled_from("abehlotw  \n12é日.▁"), max_size=25)


def corpus() -> Iterator[str]:
    for seed in range(400):
        words = ["the", "hello", "low", "at", "wot", "tab", "12", "1", "the.", "e", "éa", "aaaa", "abab"]
        yield " ".join(words[(seed * place * 7 + place + seed) % len(words)] for place in range(1, 9))


@cache
def trained(kind: str) -> bytes:
    model = io.BytesIO()
    options = {"vocab_size": 330 if KINDS[kind].get("byte_fallback") else 60, "num_threads": 1, "minloglevel": 2, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=corpus(), model_writer=model, **options | KINDS[kind])
    return model.getvalue()


def library(kind: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=trained(kind))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentencepiece")


def directory(folder: Path, kind: str, **files: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(trained(kind))
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
        (folder / f"{name}.json").write_text(json.dumps(files.get(name, {})))
    return from_directory(folder)


@cache
def changed(kind: str, change: str) -> bytes:
    """The model, with two fifths of its characters renamed ("gone"), or with some pieces marked as unused ("unused")."""
    proto: Any = schema.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(trained(kind))
    chance = random.Random(7)
    for place, piece in enumerate(proto.pieces):
        if piece.type == TokenType.NORMAL and chance.random() < (0.4 if len(piece.piece) == 1 else 0.1):
            if change == "unused":
                piece.type = int(TokenType.UNUSED)
            elif change == "gone" and len(piece.piece) == 1:
                piece.piece = f"[gone{place}]"
    serialized: bytes = proto.SerializeToString()
    return serialized


@pytest.mark.parametrize("change", ["", "gone", "unused"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(kind: str, change: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(changed(kind, change))
    tokenizer = from_directory(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_proto=changed(kind, change))

    @given(text=TEXTS)
    @example("aaaaaaa bababab")
    @example("  the  hello\n\n tab ")
    @example("héllo ﬁ 日本 <t>the<t> 3.14 １２")
    @example("the <t> \t\u3000▁wot")
    @example("つ😤Ƅ😒Šő³〫\n\n")
    @settings(max_examples=examples(60), deadline=None)
    def same(text: str) -> None:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)

    same()


def test_pieces_of_a_gguf_file_whose_characters_are_no_pieces(folder: Path) -> None:
    proto: Any = schema.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(changed("llama", "gone"))
    reference = sentencepiece.SentencePieceProcessor(model_proto=changed("llama", "gone"))
    tokenizer = from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
            "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
            "tokenizer.ggml.token_type": [piece.type for piece in proto.pieces],
        }
    )
    for text in golden()["texts"]:
        assert tokenizer.encode(text) == [1, *reference.encode(text)]
    assert tokenizer.encode("the</s>the") == [1, *reference.encode("the"), 2, *reference.encode("the")]
    with pytest.raises(TokenizerError, match=r"cannot be written as tokenizer\.json: a character of its piece"):
        tokenizer.save(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_that_of_the_library(kind: str, folder: Path) -> None:
    tokenizer, reference = directory(folder, kind), library(kind)
    for text in ("the hello", " the  low", "12 wot."):
        ids = [token_id for token_id in reference.encode(text) if token_id != reference.unk_id()]  # the library has a text for that one
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_llama_models_begin_with_bos_and_t5_ends_with_eos(folder: Path) -> None:
    assert directory(folder, "llama").encode("the")[:1] == [1]
    assert directory(folder, "unigram").encode("the")[-1:] == [2]
    config = {"add_bos_token": False, "add_eos_token": True}
    ids = directory(folder, "llama", tokenizer_config=config).encode("the")
    assert (ids[0] != 1, ids[-1]) == (True, 2)


def test_tokens_that_the_other_files_add(folder: Path) -> None:
    size = library("llama").vocab_size()
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}
    added = {"<|im_start|>": size, "<|im_end|>": size + 2}
    tokenizer = directory(folder, "llama", tokenizer_config=config, added_tokens=added)
    assert tokenizer.encode("the<|im_end|>", add_special_tokens=False)[-1] == size + 2
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, {size + 2}, size + 3)
    decoder = {"added_tokens_decoder": {str(size): {"content": "<x>", "special": False}, "0": {"content": "<unk>", "special": True}}}
    tokenizer = directory(folder, "llama", tokenizer_config=decoder)
    assert tokenizer.decode(tokenizer.encode("the<x>")) == "the<x>"


def test_a_gguf_file_with_the_same_pieces_gives_the_same_ids(folder: Path) -> None:
    reference = library("llama")
    size = reference.vocab_size()
    kinds = [2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1 for i in range(size)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
    }
    from_file, from_model = from_gguf(metadata), directory(folder, "llama")
    for text in golden()["texts"]:
        assert from_file.encode(text) == from_model.encode(text) == [1, *reference.encode(text)]


@pytest.mark.parametrize("cut", [0, 1, 100, 1000])
def test_a_model_that_is_cut_or_not_one(cut: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained("llama")[:cut] + b"\xff" * 3)
    with pytest.raises(TokenizerError, match="not a SentencePiece model, or is corrupt"):
        from_directory(tmp_path)


@pytest.mark.parametrize("options", [{"model_type": "char"}, {"model_type": "bpe", "treat_whitespace_as_suffix": True}])
def test_kinds_that_are_not_supported(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, str(options), options)
    (tmp_path / "tokenizer.model").write_bytes(trained(str(options)))
    with pytest.raises(TokenizerError, match="not supported"):
        from_directory(tmp_path)


def test_an_added_token_far_out_is_refused(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="4000000000"):
        directory(folder, "llama", added_tokens={"<x>": 4_000_000_000})
