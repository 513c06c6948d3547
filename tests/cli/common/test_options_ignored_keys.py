"""`--ignore-config-key` of every command that reads a config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def source(chat_model: str, tmp_path: Path) -> str:
    copy = tmp_path / "model"
    shutil.copytree(chat_model, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8")) | {"warp_factor": 9}
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(copy)


@pytest.mark.parametrize(
    "command",
    [("models", "show", "SRC"), ("doctor", "SRC"), ("run", "SRC", "hi", "--max-tokens", "1"), ("convert", "SRC", "DST", "--no-measure")],
)
def test_the_way_on_from_a_refusal(command, source, tmp_path, call):
    arguments = [{"SRC": source, "DST": str(tmp_path / "out")}.get(word, word) for word in command]
    refused = call(*arguments)
    assert refused.code == 2
    assert "--ignore-config-key warp_factor" in refused.err
    accepted = call(*arguments, "--ignore-config-key", "warp_factor")
    assert accepted.code == 0
    assert "warp_factor" in accepted.out + accepted.err
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    wrong = call(*arguments, "--ignore-config-key", "warp_factor", "--ignore-config-key", "nonesuch")
    assert (wrong.code, "nonesuch" in wrong.err) == (2, True)


def test_a_comparison_passes_over_the_key_in_the_models_that_have_it(source, chat_model, call, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words to read again and again. " * 80, encoding="utf-8")
    arguments = ("eval", "kl", source, chat_model, "--positions", "64", "--window", "32", "--text", str(text))
    assert "--ignore-config-key warp_factor" in call(*arguments).err
    accepted = call(*arguments, "--ignore-config-key", "warp_factor")
    assert (accepted.code, accepted.err.count("warp_factor")) == (0, 1)
    wrong = call(*arguments, "--ignore-config-key", "warp_factor", "--ignore-config-key", "nonesuch")
    assert (wrong.code, "no key 'nonesuch'" in wrong.err) == (2, True)
