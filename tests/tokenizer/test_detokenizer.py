from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples
from support.tokenizers.golden_tokenizers import golden, golden_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from mlxinfer.errors import TokenizerError
from mlxinfer.tokenizer import Detokenizer
from mlxinfer.tokenizer.backend import TokenizersBackend
from mlxinfer.tokenizer.byte_level import ByteLevelBackend
from mlxinfer.tokenizer.detokenizer import TokenBytes

NAMES = ("smollm2", "qwen35", "llama-spm", "gemma-3", "gemma-4")
IDS = st.lists(st.integers(0, 700), max_size=12)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.mark.parametrize("name", NAMES)
@given(ids=IDS)
@settings(max_examples=examples(60), deadline=None)
def test_pieces_joined_are_the_decoding_of_the_whole(name: str, ids: list[int]) -> None:
    tokenizer = golden_tokenizer(name)
    assert "".join(stream(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.sampled_from("aé日🦙\u0301 \n1▁"), max_size=12))
@settings(max_examples=examples(60), deadline=None)
def test_never_half_a_character(name: str, text: str) -> None:
    tokenizer = golden_tokenizer(name)
    pieces = stream(tokenizer.detokenizer(), tokenizer.encode(text))
    whole = tokenizer.decode(tokenizer.encode(text))
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_undoes_encoding(name: str) -> None:
    tokenizer = golden_tokenizer(name)
    for text in golden()["texts"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=IDS)
@example([3, 4])
@settings(max_examples=examples(300), deadline=None)
def test_byte_level_decoding_is_that_of_the_library(ids: list[int]) -> None:
    tokenizer = golden_tokenizer("smollm2")
    assert isinstance(tokenizer._backend, ByteLevelBackend)
    library = tokenizer._backend._read_whole().tokenizer
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def word_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    words = ["▁a", "▁", "b", "▁b▁", "<0xE2>", "<0x82>", "<0xAC>", "x", "Ġ", "<s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "x"))
    tokenizer.add_tokens([AddedToken("<s>", special=True), AddedToken("é 1", normalized=False)])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


SPACES = decoders.Replace("▁", " ")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Fuse(),
        decoders.ByteLevel(),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([SPACES, decoders.Fuse()]),
        decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([SPACES, decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([SPACES, decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])]),
    ],
)
@given(ids=st.lists(st.integers(0, 12), max_size=6))
@settings(max_examples=examples(80), deadline=None)
def test_decoders_taken_apart_give_the_library_s_text(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    tokenizer = word_tokenizer(decoder)
    for skip in (True, False):
        text = "".join(stream(Detokenizer(TokenBytes(TokenizersBackend(tokenizer)), skip_special_tokens=skip), ids))
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_bytes_wait_for_their_character() -> None:
    fallback = decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()])
    pieces = TokenBytes(TokenizersBackend(word_tokenizer(fallback)))
    assert stream(Detokenizer(pieces), [2, 4, 5, 6, 2]) == ["b", "", "", "€", "b", ""]
    assert stream(Detokenizer(pieces), [4, 2, 4, 9, 5]) == ["", "\ufffdb", "", "", "", "\ufffd"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), SPACES]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 1, 0)]),
    ],
)
def test_a_decoder_that_needs_the_whole_text_is_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(TokenizerError, match="decoder"):
        TokenBytes(TokenizersBackend(word_tokenizer(decoder)))


def test_a_regular_expression_in_a_decoder_is_refused() -> None:
    tokenizer = json.loads(word_tokenizer(SPACES).to_str())
    tokenizer["decoder"]["pattern"] = {"Regex": "▁+"}
    with pytest.raises(TokenizerError, match="regular expression"):
        TokenBytes(TokenizersBackend(Tokenizer.from_str(json.dumps(tokenizer))))
