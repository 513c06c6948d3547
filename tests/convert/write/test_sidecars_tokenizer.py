"""Tokenizer files other than tokenizer.json are copied to the converted model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory
from support.tokenizers.ranked_vocabularies import ranked, write_ranks, write_tekken

from mlxinfer.convert import convert
from mlxinfer.loading.load import load_tokenizer, open_checkpoint


@pytest.mark.parametrize("file", ["tekken.json", "tiktoken.model"])
def test_a_tokenizer_of_ranks_goes_with_the_model(file: str, tmp_path: Path) -> None:
    source = tiny_directory(tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    write_tekken(source) if file == "tekken.json" else write_ranks(source, file)
    (source / "tokenization_kimi.py").write_text("raise SystemExit")
    convert(source, tmp_path / "out", bits=4, encoder="minmax", measure=False)
    assert not (tmp_path / "out" / "tokenization_kimi.py").exists()
    before, after = (load_tokenizer(open_checkpoint(path)) for path in (source, tmp_path / "out"))
    for text in ranked()["texts"]:
        assert after.encode(text) == before.encode(text)
    assert (after.eos_token_ids, after.chat_template) == (before.eos_token_ids, before.chat_template)
