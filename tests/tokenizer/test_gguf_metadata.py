from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples
from support.tokenizers.golden_tokenizers import golden, golden_metadata, golden_tokenizer
from support.tokenizers.tokenizer_complaints import complaint_about

from mlxinfer.errors import TokenizerError
from mlxinfer.tokenizer import from_gguf
from mlxinfer.tokenizer.backend import TokenizersBackend
from mlxinfer.tokenizer.sentencepiece_library import SentencePieceBackend
from mlxinfer.tokenizer.vocab import _split_merge, split_merges

CONTROL, USER_DEFINED = 3, 4


def byte_level(*special: str, kind: int = CONTROL, **keys: Any) -> dict[str, Any]:
    """A tokenizer of a few letters; `special` tokens get the ids from 5."""
    tokens = ["a", "b", "ab", "Ġ", "Ċ", *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 5 + [kind] * len(special),
        "tokenizer.ggml.merges": ["a b"],
        **{f"tokenizer.{'' if key.startswith('chat') else 'ggml.'}{key}": value for key, value in keys.items()},
    }


def sentencepiece(**keys: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "<0x62>"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -2.0, -1.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 6],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def test_special_tokens_in_a_text_are_parsed() -> None:
    tokenizer = from_gguf(byte_level("<|x|>"))
    assert tokenizer.encode("ab<|x|> a") == [2, 5, 3, 0]
    assert tokenizer.decode([2, 5, 0]) == "aba"
    assert tokenizer.decode([2, 5, 0], skip_special_tokens=False) == "ab<|x|>a"
    assert tokenizer.token_text(5) == "<|x|>"


def test_user_defined_tokens_are_text() -> None:
    tokenizer = from_gguf(byte_level("<tool>", kind=USER_DEFINED))
    assert tokenizer.encode("a<tool>") == [0, 5]
    assert tokenizer.decode([0, 5]) == "a<tool>"


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        (byte_level("<s>", bos_token_id=5), [0]),
        (byte_level("<s>", bos_token_id=5, add_bos_token=True), [5, 0]),
        (byte_level("<s>", "</s>", bos_token_id=5, eos_token_id=6, add_bos_token=True, add_eos_token=True), [5, 0, 6]),
        (byte_level("<s>", bos_token_id=5, pre="llama-bpe"), [5, 0]),
        (byte_level("<s>", bos_token_id=5, pre="llama-bpe", add_bos_token=False), [0]),
        (byte_level("<s>", bos_token_id=99, add_bos_token=True), [0]),
        (sentencepiece(), [1, 5]),
        (sentencepiece(add_bos_token=False), [5]),
        (sentencepiece(add_space_prefix=False, add_eos_token=True), [1, 4, 2]),
    ],
)
def test_what_stands_around_a_text(metadata: dict[str, Any], ids: list[int]) -> None:
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("a") == ids
    assert not {tokenizer.bos_token_id, *tokenizer.eos_token_ids} & set(tokenizer.encode("a", add_special_tokens=False))


@pytest.mark.parametrize(
    ("metadata", "eos"),
    [
        (byte_level("<e>", eos_token_id=5), {5}),
        (byte_level("<e>", "<t>", "<m>", eos_token_id=5, eot_token_id=6, eom_token_id=7), {5, 6, 7}),
        (byte_level("<e>", "<t>", "<m>", eos_token_id=5, eos_token_ids=np.array([6, 7, 99, -1])), {5, 6, 7}),
        (byte_level("<e>", "<|im_end|>", eos_token_id=5), {5, 6}),
        (byte_level("<eos>", "<end_of_turn>"), {5, 6}),
        (byte_level("<|return|>", "<|call|>", "<|end|>", eos_token_id=5), {5, 6}),
        (byte_level("<|end|>"), {5}),
        (byte_level("</s>", kind=USER_DEFINED), set()),
        (byte_level("<|im_end|>", kind=1), set()),
        (byte_level(), set()),
        (sentencepiece(), {2}),
    ],
)
def test_every_end_of_turn_is_known(metadata: dict[str, Any], eos: set[int]) -> None:
    assert from_gguf(metadata).eos_token_ids == eos


def test_chat_templates_by_name() -> None:
    metadata = byte_level("<s>", bos_token_id=5, chat_template="{{ bos_token }}plain")
    metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools:{{ tools[0].name }}"}
    tokenizer = from_gguf(metadata)
    assert tokenizer.chat_template == "{{ bos_token }}plain"
    assert tokenizer.render_chat([]) == "<s>plain"
    assert tokenizer.render_chat([], tools=[{"name": "f"}]) == "tools:f"


@pytest.mark.smoke
def test_byte_fallback_and_the_space_before_a_text() -> None:
    tokenizer = from_gguf(sentencepiece())
    assert tokenizer.encode("a ab") == [1, 5, 5, 6]
    assert tokenizer.decode([5, 5, 6]) == "a ab"
    assert tokenizer.encode("é") == [1, 3, 0]


def test_spaces_before_a_text_come_after_each_special_token() -> None:
    assert from_gguf(sentencepiece()).encode("a</s>a") == [1, 5, 2, 5]


def test_phi_3_swallows_spaces_after_special_tokens() -> None:
    metadata = golden_metadata("phi-3") | {"general.name": "Phi-3 mini"}
    tokens = ["<|user|>", *metadata["tokenizer.ggml.tokens"][1:]]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL, *metadata["tokenizer.ggml.token_type"][1:]]}
    tokenizer = from_gguf(metadata | {"tokenizer.ggml.unknown_token_id": 1})
    assert tokenizer.encode("<|user|> \n1") == tokenizer.encode("<|user|>1")


def test_gemma_s_runs_of_spaces_and_literal_marks() -> None:
    tokenizer = golden_tokenizer("gemma-3")
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("a" + " " * 40 + "b", add_special_tokens=False)]
    assert texts == ["a", " " * 31, " " * 9, "b"]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a ▁b", add_special_tokens=False)] == ["a", "  ", "b"]


def test_numpy_arrays_do_as_well_as_lists() -> None:
    for name in ("llama-spm", "smollm2"):
        metadata = golden_metadata(name)
        for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
            if key in metadata:
                metadata[key] = np.array(metadata[key], np.float32 if "scores" in key else np.int32)
        assert from_gguf(metadata).encode(golden()["texts"][-1]) == golden_tokenizer(name).encode(golden()["texts"][-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv', which is not supported"),
        ({"tokenizer.ggml.model": "t5"}, "'t5', which is not supported"),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is 3, must be a string"),
        ({"tokenizer.ggml.pre": "nobody-knows"}, "unknown pre-tokenizer 'nobody-knows'"),
        ({"tokenizer.ggml.tokens": None}, "has no tokens"),
        ({"tokenizer.ggml.tokens": []}, "has no tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.tokens": ["a", 2]}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens is not an array"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a", "ab", "c"]}, "tokens 0 and 2 are both 'a'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 values for 5 tokens"),
        ({"tokenizer.ggml.token_type": ["x"] * 5}, "token_type is not an array of numbers"),
        ({"tokenizer.ggml.merges": None}, "has no merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' is not a merge"),
        ({"tokenizer.ggml.merges": ["a z"]}, "z"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id is '<s>', must be a whole number"),
        ({"tokenizer.chat_template": 5}, "chat_template is 5, must be a string"),
        ({"tokenizer.ggml.model": "llama"}, "has no scores"),
    ],
)
def test_a_corrupt_file_is_told_in_one_line(change: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (byte_level() | change).items() if value is not None}
    with pytest.raises(TokenizerError, match=message) as caught:
        from_gguf(metadata)
    assert "\n" not in str(caught.value)


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(), st.text("ab <>▁Ġ\n\x00", max_size=4)),
    st.lists(st.one_of(st.integers(-2, 9), st.floats(), st.text("ab <▁Ġ", max_size=3)), max_size=7),
)


def complaint(metadata: dict[str, Any]) -> str:
    """Return the error of building and using a tokenizer; empty if both work."""
    return complaint_about(lambda: from_gguf(metadata), "ab a")


@given(base=st.sampled_from([byte_level("<s>"), sentencepiece()]), data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_any_metadata_makes_a_tokenizer_or_a_one_line_error(base: dict[str, Any], data: st.DataObject) -> None:
    keys = [*base, "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"]
    changed = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3))
    assert "\n" not in complaint(base | {key: data.draw(VALUES) for key in changed})


@cache
def gemma_in_both_libraries() -> tuple[SentencePieceBackend, TokenizersBackend]:
    backend = golden_tokenizer("gemma-3")._backend
    assert isinstance(backend, SentencePieceBackend)
    return backend, TokenizersBackend(backend.whole().in_tokenizers())


@given(
    text=st.text(st.sampled_from("aehlnot  \n\t1é日🦙▁<>"), max_size=20).map(lambda text: text.replace("<", "<unk>").replace(">", "<eos>"))
)
@example("<eos>  <bos>a\n\n\n\t\t b<unk><unk>")
@settings(max_examples=examples(200), deadline=None)
def test_both_libraries_cut_texts_alike(text: str) -> None:
    ours, other = gemma_in_both_libraries()
    for special in (True, False):
        assert ours.encode(text, special) == other.encode(text, special)
    assert ours.special == other.special


def test_what_sentencepiece_does_not_take_goes_to_the_other_library() -> None:
    metadata = sentencepiece(add_space_prefix=False)
    tokenizer = from_gguf(metadata)
    assert isinstance(tokenizer._backend, TokenizersBackend)  # one byte of 256
    assert tokenizer.encode("a b") == [1, 4, 3, 6]
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3, 1, 1, 1, 1]
    assert isinstance(from_gguf(metadata)._backend, SentencePieceBackend)
    metadata["tokenizer.ggml.tokens"][5] = "a"
    with pytest.raises(TokenizerError, match="tokens 4 and 5 are both 'a'"):
        from_gguf(metadata)


@given(merges=st.lists(st.text(" ab\0\n", min_size=1, max_size=4)))
@example(["a b", "b"])
@example(["ab", "c d e"])
@example([" a b", "a  b"])
@settings(max_examples=examples(200), deadline=None)
def test_merges_are_split_alike_one_by_one_and_all_at_once(merges: list[str]) -> None:
    try:
        expected = list(map(_split_merge, merges))
    except TokenizerError:
        with pytest.raises(TokenizerError):
            split_merges(merges)
    else:
        assert split_merges(merges) == expected
