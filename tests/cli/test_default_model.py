from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.formats.tiny_gguf import write_tiny_gguf

from mlxinfer.loading.find import catalog


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without installed models."""
    monkeypatch.setattr(catalog, "ALIASES", {})


@pytest.fixture
def converted(bare: None, chat_model: str, own_home: Path) -> Path:
    return Path(shutil.copytree(chat_model, own_home / "models" / "mine"))


def test_the_model_that_is_here_answers(call, converted):
    said = call("run", "one two three", "--max-tokens", "4", "-t", "0")
    assert (said.code, said.out) == (0, call("run", "mine", "one two three", "--max-tokens", "4", "-t", "0").out)
    assert call("run", "--max-tokens", "4", "-t", "0", stdin="one two three").out == said.out
    assert call("chat", "--max-tokens", "4", "-t", "0", stdin="one two three\n").code == 0


def test_the_largest_model_that_chats_is_taken_and_named(call, converted, own_home, tmp_path):
    larger = Path(shutil.copytree(converted, own_home / "models" / "larger"))
    (larger / "notes.txt").write_text("x" * 10_000)
    base = own_home / "models" / "base"
    base.mkdir()
    shutil.copytree(converted, base, dirs_exist_ok=True)
    (base / "notes.txt").write_text("x" * 20_000)
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (own_home / ".cache" / "llama.cpp").mkdir(parents=True)
    write_tiny_gguf(own_home / "models" / "tiny.gguf")
    said = call("run", "one two three", "--max-tokens", "1", "-t", "0")
    assert said.code == 0
    assert "with larger; mlxinfer models list shows 3 more" in said.err
    assert call("run", "one two three", "--max-tokens", "1", "-t", "0", "-q").err == ""


def test_nothing_is_fetched_where_nobody_can_be_asked(call, bare):
    for command in (("chat",), ("run", "one two three")):
        result = call(*command, stdin="hi\n")
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "mlxinfer models recommend" in result.err


SCRIPT = """
from mlxinfer.loading.find import catalog
catalog.ALIASES = {}
from mlxinfer.cli import main
main(["chat"])
"""


@pytest.mark.parametrize(("answer", "code"), [("n\n", 130), ("y\n", 2)])
def test_a_download_is_offered_and_only_made_after_a_yes(answer, code, own_home):
    """On a terminal. The hub cannot be reached: after "y" the command says so."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(own_home / "hf"), "TERM": "dumb"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.write(ours, answer.encode())
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(timeout=120) == code, said
    text = " ".join(said.decode().split())
    assert "No model is here yet." in text
    assert "Fetch " in text
    assert ("HF_HUB_OFFLINE is set" in text) == (code == 2)
