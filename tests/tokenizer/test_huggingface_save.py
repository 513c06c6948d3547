"""Saved tokenizers load again, here and in transformers, and give the same ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tokenizers.golden_tokenizers import golden, golden_metadata, golden_tokenizer

from mlxinfer.errors import TokenizerError
from mlxinfer.tokenizer import from_directory, from_gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TALK = [{"role": "user", "content": "Hello <é>"}]


@pytest.mark.parametrize("name", ["smollm2", "llama-bpe", "qwen35", "llama-spm", "gemma-3", "gemma-4"])
def test_a_saved_tokenizer_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    original = golden_tokenizer(name)
    original.save(tmp_path)
    again = from_directory(tmp_path)
    for text in golden()["texts"]:
        assert again.encode(text) == original.encode(text)
        assert again.decode(again.encode(text)) == original.decode(original.encode(text))
    assert (again.bos_token_id, again.vocab_size) == (original.bos_token_id, original.vocab_size)
    assert again.eos_token_ids <= original.eos_token_ids


@pytest.mark.parametrize("name", ["smollm2", "llama-spm", "gemma-3"])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    original = from_gguf(golden_metadata(name) | {"tokenizer.chat_template": TEMPLATE})
    original.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text" if name == "gemma-3" else "llama"}))
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in golden()["texts"]:
        assert loaded.encode(text) == original.encode(text)
        ids = original.encode(text)
        assert loaded.decode(ids, skip_special_tokens=True) == original.decode(ids)
    assert loaded.apply_chat_template(TALK, tokenize=False) == original.render_chat(TALK)
    assert loaded.apply_chat_template(TALK, return_dict=False) == original.encode_chat(TALK)
    assert loaded.bos_token_id == original.bos_token_id
    assert loaded.eos_token_id in original.eos_token_ids


def test_templates_are_saved_by_name(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": TEMPLATE, "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    from_gguf(golden_metadata("smollm2") | templates).save(tmp_path)
    again = from_directory(tmp_path)
    assert again.chat_template == TEMPLATE
    assert again.render_chat(TALK, tools=[{"name": "f"}]) == "tools"


def test_a_template_s_name_does_not_lead_elsewhere(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_templates": ["../../x"], "tokenizer.chat_template.../../x": "x"}
    with pytest.raises(TokenizerError, match="has a name that cannot be a file name"):
        from_gguf(golden_metadata("smollm2") | templates).save(tmp_path)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="writ"):
        golden_tokenizer("smollm2").save(tmp_path / "nowhere")
