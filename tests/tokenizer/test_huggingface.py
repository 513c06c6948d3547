from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples
from support.tokenizers.tokenizer_complaints import complaint
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlxinfer.errors import PromptError, TokenizerError
from mlxinfer.tokenizer import from_directory

WORDS = ["<s>", "</s>", "<|im_end|>", "a", "b", "ab", "Ġ", "Ċ"]


def backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [("a", "b")]))
    tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex("x+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer | str | None = None, **files: Any) -> Path:
    """`files` are the JSON files beside it: a text is written as it is."""
    contents = tokenizer if isinstance(tokenizer, str) else (tokenizer or backend()).to_str()
    (directory / "tokenizer.json").write_text(contents, encoding="utf-8")
    for name, value in files.items():
        (directory / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def test_the_post_processor_decides_about_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "add_bos_token": False, "add_eos_token": True}
    tokenizer = from_directory(write(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("ab") == [0, 5]
    assert tokenizer.encode("ab", add_special_tokens=False) == [5]


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = backend()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert from_directory(write(tmp_path, tokenizer)).encode("aaaa") == [0, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("files", "bos"),
    [
        ({"tokenizer_config": {"bos_token": "<s>"}}, 0),
        ({"tokenizer_config": {"bos_token": {"content": "<s>", "lstrip": False}}}, 0),
        ({"special_tokens_map": {"bos_token": "<s>"}}, 0),
        ({"config": {"bos_token_id": 0}}, 0),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 0}}, None),
        ({}, None),
    ],
)
def test_where_bos_is_found(files: dict[str, Any], bos: int | None, tmp_path: Path) -> None:
    assert from_directory(write(tmp_path, **files)).bos_token_id == bos


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, {1}),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, {1}),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": "<s>"}}, {1}),
        ({"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {}}}, {1}),
        ({"config": {"eos_token_id": 2}}, {2}),
        ({"config": {"text_config": {"eos_token_id": [2]}}}, {2}),
        ({"generation_config": {"eos_token_id": [1, 2]}, "tokenizer_config": {"eos_token": "</s>"}}, {1, 2}),
        ({"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": 2}}, {1, 2}),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": ["x", -1, True]}}, set()),
        ({}, set()),
    ],
)
def test_every_end_of_turn_is_known(files: dict[str, Any], eos: set[int], tmp_path: Path) -> None:
    assert from_directory(write(tmp_path, **files)).eos_token_ids == eos


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    decoder = {
        "9": {"content": "<x>", "special": False},
        "8": {"content": "<y>", "special": True},
        "0": {"content": "<s>", "special": True},
    }
    config = {"added_tokens_decoder": decoder, "additional_special_tokens": ["<z>"], "pad_token": "<p>"}
    tokenizer = from_directory(write(tmp_path, tokenizer_config=config))
    ids = tokenizer.encode("a<x><y><z><p>", add_special_tokens=False)
    assert ids[:3] == [3, 9, 8]
    assert sorted(ids[3:]) == [10, 11]
    assert tokenizer.decode(ids) == "a<x>"
    assert tokenizer.vocab_size == 12


def test_added_tokens_json(tmp_path: Path) -> None:
    files = {"added_tokens": {"<tool>": 8, "<e>": 9}, "special_tokens_map": {"eos_token": "<e>"}}
    tokenizer = from_directory(write(tmp_path, **files))
    assert tokenizer.encode("<tool>a<e>", add_special_tokens=False) == [8, 3, 9]
    assert tokenizer.decode([8, 3, 9]) == "<tool>a"
    assert tokenizer.eos_token_ids == {9}


def test_chat_templates_beside_the_model_win(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "from config", "eos_token": "</s>"})
    assert from_directory(tmp_path).chat_template == "from config"
    write(tmp_path, chat_template={"chat_template": "from json"})
    assert from_directory(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }} é from jinja", encoding="utf-8")
    assert from_directory(tmp_path).render_chat([]) == "</s> é from jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert from_directory(tmp_path).render_chat([], tools=[{"name": "f"}]) == "with tools"


def test_chat_templates_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = from_directory(write(tmp_path, tokenizer_config={"chat_template": named}))
    assert (tokenizer.chat_template, tokenizer.render_chat([]), tokenizer.render_chat([], tools=[{}])) == ("plain", "plain", "tools")


@pytest.mark.smoke
def test_a_conversation_gets_no_second_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}<|im_end|>{{ suffix }}"}
    tokenizer = from_directory(write(tmp_path, tokenizer_config=config))
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}], suffix="a") == [0, 5, 2, 3]


def test_ids_that_the_vocabulary_has_not_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = from_directory(write(tmp_path))
    assert tokenizer.decode([3, 99, -1, 2**40, 4]) == "ab"
    assert (tokenizer.token_text(99), tokenizer.token_text(6)) == ("", " ")


def test_a_text_that_is_not_unicode(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="lone surrogate at character 1"):
        from_directory(write(tmp_path)).encode("a\ud83d")


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        from_directory(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": "{"}, "tokenizer_config.json cannot be read"),
        ({"tokenizer_config": "[]"}, "tokenizer_config.json is corrupt"),
        ({"config": "[" * 100_000}, "config.json cannot be read"),
        ({"special_tokens_map": "\x00"}, "special_tokens_map.json cannot be read"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "chat_template"),
        ({"tokenizer": ""}, "reading .*tokenizer.json failed"),
        ({"tokenizer": "{}"}, "reading .*tokenizer.json failed"),
        ({"tokenizer": '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}'}, "reading .*tokenizer.json failed"),
        ({"tokenizer": backend().to_str()[:-200]}, "reading .*tokenizer.json failed"),
    ],
)
def test_corrupt_files_are_told_in_one_line(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, files.pop("tokenizer", None), **files)
    with pytest.raises(TokenizerError, match=message) as caught:
        from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    (write(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read"):
        from_directory(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_panic_of_the_library_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    contents = json.loads(backend().to_str())
    contents["post_processor"]["special_tokens"] = {}
    with pytest.raises(TokenizerError, match="setting up the tokenizer failed"):
        from_directory(write(tmp_path, json.dumps(contents)))
    assert "Traceback" not in capfd.readouterr().err


VALUES = [None, 0, -1, 2**40, "", "x", "a b", "(?", [], {}, [1], {"a": 1}, True]


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_tokenizer_json_works_or_is_told_in_one_line(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    contents = json.loads(backend().to_str())
    contents["post_processor"] = None
    inner = contents[data.draw(st.sampled_from(["model", "normalizer", "pre_tokenizer", "decoder"]))]
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(st.sampled_from(VALUES))
    text = json.dumps(contents)
    cut = data.draw(st.sampled_from([len(text), len(text), len(text) - 1, len(text) // 2]))
    assert "\n" not in complaint(write(tmp_path_factory.mktemp("any"), text[:cut]))
