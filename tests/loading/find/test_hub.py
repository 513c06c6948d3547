from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http.hub_server import hub

from mlxinfer.loading.find.hub import HubId

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"\x80",
    "original/consolidated.safetensors": b"x" * 100,
    "consolidated.safetensors": b"x" * 100,
}
RANKED = {name: FILES[name] for name in ("config.json", "model.safetensors")} | dict.fromkeys(
    ("tekken.json", "tiktoken.model", "qwen.tiktoken", "spiece.model", "SYSTEM_PROMPT.txt"), b"x"
)
REPOS = {
    "org/model": FILES,
    "org/ranked": RANKED | {"tokenization_kimi.py": b"raise SystemExit", "model.pth": b"\x80"},
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"\x80"},
    "org/ggufs": {"a.gguf": b"GGUF", "b.gguf": b"GGUF"},
}
SCRIPT = """
import sys
from mlxinfer.errors import MLXInferError
from mlxinfer.loading.find.resolve import resolve
for what in sys.argv[1:]:
    try:
        print(resolve(what).path)
    except MLXInferError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[str]]]:
    with hub(REPOS) as served:
        yield served


def ask(*what: str, home: Path, endpoint: str, **environment: str) -> str:
    """Run in a process of its own, because the hub's client reads its settings on import. Returns one line for each."""
    settings = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "MLXINFER_HOME": str(home),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *what], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ids() -> None:
    assert HubId.parse("org/name") == HubId("org/name")
    assert HubId.parse("org/name@v1.0") == HubId("org/name", None, "v1.0")
    assert HubId.parse("org/name/sub/x.gguf") == HubId("org/name", "sub/x.gguf")
    for text in ("name", "a/b/c", "a/../b.gguf", "/a/b", "a b/c", "", "a/b@"):
        assert HubId.parse(text) is None


@pytest.mark.long
def test_only_what_is_needed_is_downloaded_and_once(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    endpoint, requests = server
    directory = Path(ask("org/model", home=tmp_path, endpoint=endpoint))
    assert {p.name for p in directory.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (directory / "config.json").read_bytes() == FILES["config.json"]
    before = len(requests)
    assert Path(ask("org/model", home=tmp_path, endpoint=endpoint)) == directory
    assert not [line for line in requests[before:] if "/resolve/" in line]
    assert Path(ask("org/model", home=tmp_path, endpoint="http://127.0.0.1:9")) == directory
    assert Path(ask("org/model", home=tmp_path, endpoint=endpoint, HF_HUB_OFFLINE="1")) == directory


def test_every_kind_of_tokenizer_is_downloaded_and_no_code(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    directory = Path(ask("org/ranked", home=tmp_path, endpoint=server[0]))
    assert {p.name for p in directory.iterdir()} == RANKED.keys()


def test_one_gguf_of_many(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    path = Path(ask("org/ggufs/b.gguf", home=tmp_path, endpoint=server[0]))
    assert path.name == "b.gguf"
    assert not (path.parent / "a.gguf").exists()


REFUSED = {
    "org/none": ("ModelNotFoundError", "not on this machine"),
    "org/gated": ("HubError", "accept its terms"),
    "org/model@v9": ("HubError", "no revision 'v9'"),
    "org/pickles": ("UnsupportedModelError", "no safetensors"),
    "org/ggufs": ("UnsupportedModelError", "org/ggufs/FILE.gguf"),
    "org/ggufs/c.gguf": ("ModelNotFoundError", "c.gguf"),
    "org/broken": ("HubError", "org/broken"),
    "-bad-/--name--": ("ModelNotFoundError", "hub id"),
}


@pytest.mark.long
def test_refusals(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    """Every refusal has one line. One process asks for all of them."""
    said = ask(*REFUSED, home=tmp_path, endpoint=server[0]).split("\n")
    for (what, (kind, hint)), line in zip(REFUSED.items(), said, strict=True):
        assert line.startswith(kind), what
        assert hint in line, what


@pytest.mark.long
def test_no_network_and_offline(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    assert "cannot be reached" in ask("org/model", home=tmp_path, endpoint="http://127.0.0.1:9")
    said = ask("org/model", home=tmp_path, endpoint=server[0], HF_HUB_OFFLINE="1")
    assert said.startswith("HubError")
    assert "HF_HUB_OFFLINE is set" in said
