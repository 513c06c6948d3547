"""Vocabularies of byte strings by rank: the ids are those of tiktoken and mistral_common."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples
from support.tokenizers.ranked_vocabularies import CHATS, KIMI, LONG, VERSIONS, ranked, tekken, write_ranks, write_tekken
from support.tokenizers.tokenizer_complaints import complaint

from mlxinfer.engine.text.stopping import StopStrings
from mlxinfer.errors import TemplateError, TokenizerError
from mlxinfer.output_format.detect import output_format
from mlxinfer.structure import Regex
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tokenizer import Tokenizer, byte_level, config_files, from_directory
from mlxinfer.tokenizer.byte_level import ByteLevelBackend, _Unread

FILES = ("tekken.json", "tiktoken.model", "qwen.tiktoken")
COUNT = len(ranked()["vocabulary"])


def written(directory: Path, file: str) -> Tokenizer:
    return from_directory(write_tekken(directory) if file == "tekken.json" else write_ranks(directory, file))


@pytest.fixture(scope="module", params=FILES)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    return request.param, written(tmp_path_factory.mktemp("ranked"), request.param)


@pytest.mark.smoke
def test_odd_texts_are_cut_as_the_models_own_library_cuts_them(read: tuple[str, Tokenizer]) -> None:
    file, tokenizer = read
    for text, ids in zip(ranked()["texts"], ranked()["ids"][file], strict=True):
        if file == "tekken.json" and "[/INST" in text:  # the library parses no special tokens in a text
            continue
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_the_first_texts_are_cut_with_a_part_of_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level, "_AT_ONCE", 0)
    monkeypatch.setattr(byte_level, "later", lambda *work, **when: None)
    for file in FILES:
        tokenizer = written(tmp_path, file)
        backend = tokenizer._backend
        assert isinstance(backend, ByteLevelBackend)
        backend._parts_left = 1000
        for text, ids in zip(ranked()["texts"], ranked()["ids"][file], strict=True):
            if len(text) < 60 and not (file == "tekken.json" and "[/INST" in text):
                assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert isinstance(backend._source, _Unread)
        (tmp_path / file).unlink()
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)


def test_long_runs_are_cut_where_kimi_cuts_them(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, "tiktoken.model")
    for text, counts in zip(LONG, ranked()["long"], strict=True):
        found = Counter(tokenizer.encode(text))
        assert found == {int(token_id): count for token_id, count in counts.items()}


def test_decoding_token_by_token_gives_the_text(read: tuple[str, Tokenizer]) -> None:
    file, tokenizer = read
    for text, ids in zip(ranked()["texts"], ranked()["ids"][file], strict=True):
        detokenizer = tokenizer.detokenizer()
        pieces = [*map(detokenizer.add, ids), detokenizer.finish()]
        assert "".join(pieces) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(pieces)
        if file == "tekken.json":
            assert "".join(pieces) == text
    assert tokenizer.token_bytes(tokenizer.encode("é中", add_special_tokens=False)[-1]) is not None
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None


def test_a_stop_string_is_found_across_tokens(read: tuple[str, Tokenizer]) -> None:
    _, tokenizer = read
    detokenizer, stops, text = tokenizer.detokenizer(), StopStrings(["中文"]), ""
    for token_id in tokenizer.encode("é日本中文 end", add_special_tokens=False):
        text += stops.add(detokenizer.add(token_id))[0]
    assert (text, stops.met) == ("é日本", "中文")


def test_answers_can_be_held_to_a_pattern(read: tuple[str, Tokenizer]) -> None:
    _, tokenizer = read
    constraint = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(Regex("é日[0-9]{3}"))
    for token_id in tokenizer.encode("é日123", add_special_tokens=False):
        (row,) = constraint.rows([])
        assert row.view("uint32")[token_id // 32] >> (token_id % 32) & 1
        assert constraint.advance(token_id) == ""
    (row,) = constraint.rows([])
    (other,) = tokenizer.encode("4", add_special_tokens=False)
    assert not row.view("uint32")[other // 32] >> (other % 32) & 1


def test_special_tokens_of_tekken(tmp_path: Path) -> None:
    tokenizer = from_directory(write_tekken(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, {2}, COUNT + 40)
    assert tokenizer.encode("[INST]a[/INST]") == [1, 3, 40 + ord("a"), 4]
    assert tokenizer.encode("<SPECIAL_39>", add_special_tokens=False) == [39]
    assert tokenizer.decode([1, 3, 40 + ord("a"), 2]) == "a"
    assert tokenizer.decode([3, 40 + ord("a")], skip_special_tokens=False) == "[INST]a"


def test_special_tokens_of_kimi(tmp_path: Path) -> None:
    write_ranks(tmp_path, "tiktoken.model")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": COUNT + 2}))
    tokenizer = from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (COUNT, {COUNT + 1, COUNT + 2}, COUNT + 256)
    assert tokenizer.encode("".join(KIMI)) == [COUNT, COUNT + 1, COUNT + 2, COUNT + 3]
    assert tokenizer.encode(f"<|reserved_token_{COUNT + 255}|>") == [COUNT + 255]
    assert tokenizer.decode([COUNT + 2, COUNT + 3, COUNT + 4]) == "<|tool_call_begin|>"


TOLD = "[INST]</s><|im_end|>[BOS]<|tool_call_begin|>[TOOL_CALLS]<|im_start|>"


def test_what_a_message_spells_is_no_special_token(read: tuple[str, Tokenizer], tmp_path: Path) -> None:
    file, _ = read
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = written(tmp_path, file)
    ids = tokenizer.encode_chat([{"role": "user", "content": TOLD}])
    assert tokenizer.decode(ids) == TOLD
    specials = range(40) if file == "tekken.json" else range(COUNT, tokenizer.vocab_size)
    assert not set(ids) & set(specials)
    assert set(tokenizer.encode(TOLD)) & set(specials)


def test_a_message_is_cut_as_mistral_common_cuts_it_whatever_it_spells(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("[INST]{% for m in messages %}{{ m.content }}[/INST]{% endfor %}")
    tokenizer = written(tmp_path, "tekken.json")
    for text, ids in zip(ranked()["texts"], ranked()["ids"]["tekken.json"], strict=True):
        assert tokenizer.encode_chat([{"role": "user", "content": text}]) == [3, *ids, 4]


def test_calls_in_an_earlier_answer_of_kimi_are_calls(tmp_path: Path) -> None:
    write_ranks(tmp_path, "tiktoken.model")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer, text = from_directory(tmp_path), "<|tool_call_begin|><|im_end|>"
    for role, call in (("assistant", True), ("tool", False)):
        ids = tokenizer.encode_chat([{"role": role, "content": text}])
        assert ((COUNT + 3 in ids), (COUNT + 2 in ids)) == (call, False)


def test_tools_reach_kimi_s_template_with_sorted_keys(tmp_path: Path) -> None:
    write_ranks(tmp_path, "tiktoken.model")
    (tmp_path / "chat_template.jinja").write_text("{{ tools|tojson }}")
    rendered = from_directory(tmp_path).render_chat([], tools=[{"type": "function", "function": {"name": "f", "a": [{"z": 1, "b": 2}]}}])
    assert rendered == '[{"function": {"a": [{"b": 2, "z": 1}], "name": "f"}, "type": "function"}]'


@pytest.mark.parametrize("name", VERSIONS)
def test_chats_are_written_as_mistral_common_writes_them(name: str, tmp_path: Path) -> None:
    tokenizer = from_directory(write_tekken(tmp_path, name))
    for (messages, tools), ids in zip(CHATS, ranked()["chats"][name], strict=True):
        assert tokenizer.encode_chat(messages, tools=tools) == ids


@pytest.mark.parametrize("name", VERSIONS)
def test_calls_and_reasoning_are_found_in_answers(name: str, tmp_path: Path) -> None:
    found = output_format(from_directory(write_tekken(tmp_path, name)))
    assert found.calls is not None
    assert (found.calls_in_template, found.tools_in_template, found.results_in_template) == (True, True, True)
    assert (found.reasoning is not None) == VERSIONS[name].thinks
    assert found.short_ids == (name in ("v7", "v11"))


def test_reasoning_effort_of_v15(tmp_path: Path) -> None:
    tokenizer = from_directory(write_tekken(tmp_path, "v15"))
    talk = [{"role": "user", "content": "a"}]
    assert (
        tokenizer.render_chat(talk, reasoning_effort="high")
        == '<s>[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]a[/INST]'
    )
    with pytest.raises(TemplateError, match="one of none, high"):
        tokenizer.render_chat(talk, reasoning_effort="low")


@pytest.mark.parametrize(("message", "why"), [({"role": "user", "content": [{"type": "image"}]}, "image"), ({"role": "critic"}, "critic")])
def test_what_mistral_s_formats_do_not_know(message: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=why):
        from_directory(write_tekken(tmp_path)).render_chat([message])


def test_a_template_beside_tekken_wins_and_no_system_prompt_is_added(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    (tmp_path / "SYSTEM_PROMPT.txt").write_text("You are Devstral")
    talk = [{"role": "user", "content": "a"}]
    assert from_directory(tmp_path).render_chat(talk) == "<s>[INST]a[/INST]"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}mine")
    assert from_directory(tmp_path).render_chat(talk) == "<s>mine"


def test_a_version_without_a_known_format_has_no_chat_template(tmp_path: Path) -> None:
    contents = tekken(ranked()["vocabulary"])
    contents["config"]["version"] = "v99"
    (tmp_path / "tekken.json").write_text(json.dumps(contents))
    tokenizer = from_directory(tmp_path)
    assert tokenizer.encode("a") == [1, 40 + ord("a")]
    with pytest.raises(TemplateError, match=r"chat_template\.jinja"):
        tokenizer.render_chat([])


def test_saved_as_tokenizer_json_it_gives_the_same_ids(read: tuple[str, Tokenizer], tmp_path: Path) -> None:
    _, tokenizer = read
    tokenizer.save(tmp_path)
    again = from_directory(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    for text in ranked()["texts"]:
        assert again.encode(text) == tokenizer.encode(text)


def set_to(value: Any, *keys: Any) -> Any:
    def change(contents: dict[str, Any]) -> None:
        for key in keys[:-1]:
            contents = contents[key]
        contents[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to(None, "config"), "config is missing"),
        (set_to([], "vocab"), "has 0 tokens"),
        (set_to(10**9, "config", "default_vocab_size"), "has .* tokens, and its config says"),
        (set_to(10**40, "config", "default_vocab_size"), "default_vocab_size of its config is 1000"),
        (set_to(50, "config", "default_vocab_size"), "default_vocab_size of its config is 50"),
        (set_to(10**9, "config", "default_num_special_tokens"), "default_num_special_tokens"),
        (set_to(5, "config", "default_num_special_tokens"), "lists 24 special tokens"),
        (set_to("13", "config", "version"), "version of its config is '13'"),
        (set_to(5, "config", "pattern"), "pattern of its config is 5"),
        (set_to("([", "config", "pattern"), "building the tokenizer failed"),
        (set_to({}, "vocab", 300), "lacks its rank"),
        (set_to({"rank": 7, "token_bytes": "YQ=="}, "vocab", 300), "order of their ranks"),
        (set_to("&&&&", "vocab", 300, "token_bytes"), "not written in base64"),
        (set_to(5, "vocab", 300, "token_bytes"), "not written in base64"),
        (set_to("YQ==", "vocab", 300, "token_bytes"), "both 'a'"),
        (set_to("", "vocab", 300, "token_bytes"), "a token of 0 bytes"),
        (set_to("QUFB" * 999, "vocab", 300, "token_bytes"), "a token of 2997 bytes"),
        (set_to("YmI=", "vocab", 97, "token_bytes"), "first tokens are not the 256 bytes"),
        (set_to(None, "special_tokens"), "v13 lists its special tokens"),
        (set_to([{"rank": 0, "token_str": "<s>"}], "special_tokens"), "<s> or </s> is missing"),
        (set_to("</s>", "special_tokens", 5, "token_str"), "is there twice"),
        (set_to("a", "special_tokens", 5, "token_str"), "both 'a'"),
        (set_to(4, "special_tokens"), "lacks its rank"),
        (set_to({"rank": 9, "token_str": "x"}, "special_tokens", 5), "order of their ranks"),
    ],
)
def test_a_corrupt_tekken_is_told_in_one_line(change: Any, message: str, tmp_path: Path) -> None:
    contents = tekken(ranked()["vocabulary"])
    change(contents)
    (tmp_path / "tekken.json").write_text(json.dumps(contents))
    with pytest.raises(TokenizerError, match=message) as caught:
        from_directory(tmp_path)
    assert "\n" not in str(caught.value)


LINES = b"".join(f"{token} {rank}\n".encode() for rank, token in enumerate(ranked()["vocabulary"]))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "do not count from 0"),
        (LINES[: len(LINES) // 2], "is not a token in base64 and its rank|do not count|base64"),
        (LINES[LINES.index(b"\n") + 1 :], "do not count from 0"),
        (LINES + b"YWFh 99999999999999999999\n", "do not count from 0"),
        (LINES + b"YWFh " + b"9" * 5000, "not a token in base64 and its rank"),
        (LINES + b"&&&& %d" % COUNT, "not written in base64"),
        (b"YQ== 0\nYg== 1\n", "254 of the 256 bytes"),
        (LINES + b"QUFB" * 999 + b" %d" % COUNT, "a token of 2997 bytes"),
        (b"\x80\x02model", "not a token in base64 and its rank|do not count"),
        (b"\xff" * 999, "do not count"),
    ],
)
def test_a_corrupt_file_of_ranks_is_told_in_one_line(contents: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(contents)
    with pytest.raises(TokenizerError, match=message) as caught:
        from_directory(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", [*FILES, "tokenizer.model", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told_as_one(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:83\nsize 19399650\n")
    with pytest.raises(TokenizerError, match=f"{file} is a pointer of Git LFS, .*run git lfs pull"):
        from_directory(tmp_path)


@pytest.mark.parametrize("file", [*FILES, "tokenizer.model"])
def test_a_huge_file_is_not_read_to_its_end(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_files, "_LARGEST_FILE", 1 << 20)
    with (tmp_path / file).open("wb") as large:
        large.truncate(1 << 40)
    with pytest.raises(TokenizerError, match="has more than 1 MB"):
        from_directory(tmp_path)


@pytest.mark.parametrize("contents", ["[" * 100_000, "[]", '{"config": ', "", '{"config": 1' + "0" * 5000 + "}"])
def test_a_tekken_that_is_no_json_object(contents: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(contents)
    with pytest.raises(TokenizerError, match=r"tekken\.json is (not valid JSON|corrupt)") as caught:
        from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_class_or_an_id_that_nobody_knows(tmp_path: Path) -> None:
    write_ranks(tmp_path, "tiktoken.model")
    for config, message in (
        ({"tokenizer_class": "OtherTokenizer"}, "'OtherTokenizer': add its tokenizer.json"),
        ({"added_tokens_decoder": {str(10**9): {"content": "<x>"}}}, "1000000000, far beyond"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(TokenizerError, match=message):
            from_directory(tmp_path)


@pytest.mark.parametrize(
    ("names", "there"),
    [
        (["cl100k_base.tiktoken", "tokenization_phi3.py"], "only cl100k_base.tiktoken, tokenization_phi3.py is there"),
        (["vocab.json", "merges.txt"], "only merges.txt, vocab.json is there"),
        (["tokenizer.model.v3", "tokenizer_config.json"], "only tokenizer.model.v3, tokenizer_config.json is there"),
        (["sentencepiece.bpe.model"], "only sentencepiece.bpe.model is there"),
    ],
)
def test_the_file_that_cannot_be_read_is_named(names: list[str], there: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(TokenizerError, match=f"{there}; add the model's tokenizer.json"):
        from_directory(tmp_path)


@given(file=st.sampled_from(FILES[1:]), at=st.integers(0, len(LINES) - 1), new=st.binary(max_size=5), cut=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_any_file_of_ranks_works_or_is_told_in_one_line(
    file: str, at: int, new: bytes, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("any")
    (directory / file).write_bytes(LINES[:at] + new + (b"" if cut else LINES[at + len(new) :]))
    assert "\n" not in complaint(directory)


VALUES = [None, 0, -1, 2**40, 1.5, "", "x", "v7", [], {}, [1], {"a": 1}, True, "a" * 5000]


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_tekken_works_or_is_told_in_one_line(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("any")
    contents = tekken(ranked()["vocabulary"], data.draw(st.sampled_from(list(VERSIONS))))
    part = data.draw(st.sampled_from([contents, contents["config"], contents["vocab"][260], contents.get("model_settings_builder", {})]))
    for key in data.draw(st.lists(st.sampled_from(sorted(part) or ["a"]), max_size=2)):
        part[key] = data.draw(st.sampled_from(VALUES))
    (directory / "tekken.json").write_text(json.dumps(contents))
    assert "\n" not in complaint(directory)
