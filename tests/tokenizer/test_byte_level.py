"""The partial vocabulary of a process's first texts gives the ids of the whole one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples
from support.tokenizers.golden_tokenizers import golden, golden_metadata

from mlxinfer.errors import TokenizerError
from mlxinfer.tokenizer import Tokenizer, byte_level, from_gguf
from mlxinfer.tokenizer.byte_level import ByteLevelBackend, _Unread
from mlxinfer.util.background import finish_background_work, later

NAMES = [name for name, found in golden()["vocabularies"].items() if found["metadata"]["tokenizer.ggml.model"] == "gpt2"]
CONTROL = 3


@pytest.fixture(autouse=True, scope="module")
def _small_vocabularies_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_level, "_AT_ONCE", 0)
        patch.setattr(byte_level, "later", lambda *work, **when: None)
        yield


def tokenizer(metadata: dict[str, Any], texts: int = 4) -> tuple[Tokenizer, ByteLevelBackend]:
    made = from_gguf(metadata)
    backend = made._backend
    assert isinstance(backend, ByteLevelBackend)
    backend._parts_left = texts
    return made, backend


def has_read_whole(backend: ByteLevelBackend) -> bool:
    return not isinstance(backend._source, _Unread)


@cache
def metadata(name: str) -> dict[str, Any]:
    """It has a special token, one with a space, BOS, and lacks the token of a rare byte."""
    found = golden_metadata(name)
    tokens = [*(token for token in found["tokenizer.ggml.tokens"] if token != "Ă"), "<|x|>", "<two words>"]
    kinds = [1] * (len(tokens) - 2) + [CONTROL] * 2
    merges = [merge for merge in found["tokenizer.ggml.merges"] if "Ă" not in merge]
    changed = {"tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": len(tokens) - 2, "add_bos_token": True}
    return found | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}


@cache
def whole(name: str) -> Tokenizer:
    made, backend = tokenizer(metadata(name), texts=0)
    made.encode("")
    assert has_read_whole(backend)
    return made


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.sampled_from("aehlnot'sTH  \n\t19é日🦙\u0301\x02.!<|x>"), max_size=30).map(lambda text: text.replace("x", "<|x|>")))
@example("<|x|>\u0338 e\u0301<two words>the The")
@example("a\x02b the")
@settings(max_examples=examples(60), deadline=None)
def test_a_part_of_the_vocabulary_cuts_a_text_as_the_whole(name: str, text: str) -> None:
    made, _ = tokenizer(metadata(name))
    for special in (True, False):
        assert made.encode(text, add_special_tokens=special) == whole(name).encode(text, add_special_tokens=special)


@pytest.mark.parametrize("name", NAMES)
def test_odd_texts_are_cut_as_llama_cpp_cuts_them(name: str) -> None:
    found = golden()["vocabularies"][name]
    for text, ids in zip(golden()["texts"], found["ids"], strict=True):
        cut, _ = tokenizer(found["metadata"])
        assert cut.encode(text, add_special_tokens=False) == ids


def test_a_few_short_texts_do_without_the_whole() -> None:
    made, backend = tokenizer(golden_metadata("smollm2"))
    for _ in range(4):
        assert made.decode(made.encode("Hello, the sun")) == "Hello, the sun"
        assert not has_read_whole(backend)
    made.encode("a")
    assert has_read_whole(backend)


@pytest.mark.parametrize("text", ["a " * 2001, "a" * 65, "a\x02"])
def test_long_texts_long_words_and_missing_bytes_want_the_whole(text: str) -> None:
    made, backend = tokenizer(metadata("smollm2"))
    made.encode("a")
    assert not has_read_whole(backend)
    made.encode(text)
    assert has_read_whole(backend)


def test_special_tokens_are_no_words() -> None:
    made, backend = tokenizer(metadata("smollm2"))
    assert made.decode(made.encode("the<two words>the"), skip_special_tokens=False) == "<|x|>the<two words>the"
    assert not has_read_whole(backend)


def test_the_whole_is_read_soon_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level, "later", later)
    made, backend = tokenizer(golden_metadata("smollm2"))
    finish_background_work()
    assert has_read_whole(backend)
    assert made.decode(made.encode("the")) == "the"


def test_what_is_saved_is_the_whole(tmp_path: Path) -> None:
    made, _ = tokenizer(golden_metadata("smollm2"))
    made.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert len(saved["model"]["merges"]) == len(golden_metadata("smollm2")["tokenizer.ggml.merges"])


@pytest.mark.parametrize(("merge", "message"), [("ab", "'ab' is not a merge"), ("t zzz", "zzz")])
def test_wrong_merges_are_told_when_the_whole_is_wanted(merge: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level, "later", later)
    found = golden_metadata("smollm2")
    made, _ = tokenizer(found | {"tokenizer.ggml.merges": [*found["tokenizer.ggml.merges"], merge]}, texts=1)
    assert made.decode(made.encode("the")) == "the"
    finish_background_work()
    for _ in range(2):
        with pytest.raises(TokenizerError, match=message):
            made.encode("the")
