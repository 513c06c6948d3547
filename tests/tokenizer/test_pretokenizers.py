"""Pre-tokenizers against llama.cpp's ids, and where no vocabulary is at hand, against what each is known for."""

from __future__ import annotations

import pytest
from support.tokenizers.golden_tokenizers import golden, golden_metadata, golden_tokenizer

from mlxinfer.errors import TokenizerError
from mlxinfer.tokenizer import from_gguf
from mlxinfer.tokenizer.detokenizer import _BYTE_OF
from mlxinfer.tokenizer.pretokenizers import _BY_NAME, pre_tokenization


def words(name: str, text: str) -> list[str]:
    pieces = pre_tokenization(name).pre_tokenizer().pre_tokenize_str(text)
    return [bytes(_BYTE_OF[char] for char in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize("name", list(golden()["vocabularies"]))
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    tokenizer = golden_tokenizer(name)
    for text, ids in zip(golden()["texts"], golden()["vocabularies"][name]["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)


@pytest.mark.parametrize(("name", "other"), [("llama-bpe", "gpt-2"), ("qwen2", "gpt-2"), ("smollm2", "gpt-2")])
def test_the_ids_tell_pre_tokenizers_apart(name: str, other: str) -> None:
    tokenizer = from_gguf({**golden_metadata(name), "tokenizer.ggml.pre": other})
    cases = zip(golden()["texts"], golden()["vocabularies"][name]["ids"], strict=True)
    assert any(tokenizer.encode(text) != ids for text, ids in cases)


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    for text in golden()["texts"]:
        pieces = pre_tokenization(name).pre_tokenizer().pre_tokenize_str(text)
        assert bytes(_BYTE_OF[char] for piece, _ in pieces for char in piece) == text.encode()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-4o", "fooBar BAZqux 12345's", ["foo", "Bar", " BAZqux", " ", "123", "45", "'s"]),
        ("gpt-4o", "HELLO's a/b\n//\n", ["HELLO's", " a", "/b", "\n", "//\n"]),
        ("tekken", "fooBar 123 don't", ["foo", "Bar", " ", "1", "2", "3", " don", "'t"]),
        ("deepseek-v3", "abc12345 日本語x, y", ["abc", "123", "45", " ", "日本語", "x", ",", " y"]),
        ("deepseek-llm", "ab 12\n中文", ["ab", " ", "1", "2", "\n", "中文"]),
        ("superbpe", "a b 1234567", ["a b ", "1", "234", "567"]),
        ("viking", "a b, c12", ["a", " b", ",", " c", "1", "2"]),
        ("seed-coder", "x!\n\ny", ["x", "!", "\n\n", "y"]),
        ("qwen35", "नमस्ते x", ["नमस्ते", " x"]),
        ("qwen2", "नमस्ते x", ["नमस", "्त", "े", " x"]),
        ("kimi-k2", "fooBar 日本x 1234//\n", ["foo", "Bar", " ", "日本", "x", " ", "123", "4", "//\n"]),
        ("minimax-m2", "fooBar 日本x 1234", ["foo", "Bar", " 日本x", " ", "123", "4"]),
        ("minicpm5", "a 12345", ["a", " ", "123", "45"]),
    ],
)
def test_known_splits(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(TokenizerError, match="'nobody-knows'"):
        pre_tokenization("nobody-knows")
