"""Models of other programs, in the folders and files that these programs write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.formats.tiny_gguf import write_tiny_gguf

from mlxinfer.loading.find.catalog import local_models
from mlxinfer.loading.find.foreign import find_foreign, foreign_models
from mlxinfer.loading.find.resolve import local_place, resolve

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"
MODEL = "application/vnd.ollama.image.model"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_tiny_gguf(path)


def ollama(root: Path, place: str, media: str = MODEL) -> Path:
    """Write a manifest at `place`, such as `registry.ollama.ai/library/gemma3/4b`, and its blob."""
    blob = gguf(root / "blobs" / f"sha256-{place.replace('/', '-')}")
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": media, "digest": blob.name.replace("sha256-", "sha256:")}]}))
    return blob


def names() -> list[tuple[str, str]]:
    return [(model.name, model.owner) for model in foreign_models()]


def test_nothing_is_there() -> None:
    assert names() == []
    assert find_foreign("") is None
    assert find_foreign("qwen3") is None


def test_ollama(home: Path) -> None:
    root = home / ".ollama" / "models"
    blob = ollama(root, "registry.ollama.ai/library/gemma3/4b")
    ollama(root, "registry.ollama.ai/library/llama3/latest")
    ollama(root, "registry.ollama.ai/someone/mine/latest")
    ollama(root, "hf.co/org/repo/Q4_K_M")
    ollama(root, "registry.ollama.ai/library/cloud/latest", media="application/vnd.ollama.image.license")
    (root / "manifests" / "registry.ollama.ai" / "library" / ".DS_Store").write_text("")
    found = [name for name, owner in names() if owner == "Ollama"]
    assert sorted(found) == ["cloud", "gemma3:4b", "hf.co/org/repo:Q4_K_M", "llama3", "someone/mine"]
    assert resolve("gemma3:4b").path == blob
    assert resolve("gemma3:4b").name == "gemma3:4b"
    assert resolve("llama3:latest").path == resolve("llama3").path
    assert resolve("mine").path == resolve("someone/mine").path
    assert [model.name for model in local_models() if model.owner == "Ollama" and model.name == "cloud"] == []
    assert local_place("gemma3:4b") == local_place(str(blob))


def test_another_folder_of_ollama(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "other"))
    ollama(home / "other", "registry.ollama.ai/library/gemma3/latest")
    assert names() == [("gemma3", "Ollama")]


def test_lm_studio(home: Path) -> None:
    root = home / ".lmstudio" / "models"
    shutil.copytree(GOLDEN / "llama", root / "mlx-community" / "Tiny-4bit")
    one = gguf(root / "org" / "One-GGUF" / "one-Q4_K_M.gguf")
    gguf(root / "org" / "One-GGUF" / "mmproj-one-f16.gguf")
    for file in ("two-Q4_K_M.gguf", "two-Q8_0-00001-of-00002.gguf", "two-Q8_0-00002-of-00002.gguf"):
        gguf(root / "org" / "Two-GGUF" / file)
    (root / "org" / "Empty").mkdir()
    assert names() == [
        (name, "LM Studio")
        for name in (
            "mlx-community/Tiny-4bit",
            "org/One-GGUF",
            "org/Two-GGUF/two-Q4_K_M.gguf",
            "org/Two-GGUF/two-Q8_0-00001-of-00002.gguf",
        )
    ]
    assert resolve("mlx-community/Tiny-4bit").path == root / "mlx-community" / "Tiny-4bit"
    assert resolve("tiny-4bit").path == root / "mlx-community" / "Tiny-4bit"
    assert resolve("org/one-gguf").path == one
    assert resolve("two-Q4_K_M").path.name == "two-Q4_K_M.gguf"


def test_lm_studio_in_another_folder(home: Path) -> None:
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'studio'}\n")
    gguf(home / "studio" / "models" / "org" / "Name-GGUF" / "a.gguf")
    assert names() == [("org/Name-GGUF", "LM Studio")]


@pytest.mark.parametrize("moved", [True, False])
def test_llama_cpp_and_the_models_folder(home: Path, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.loading.find.foreign.sys.platform", "linux")
    if moved:
        monkeypatch.setenv("LLAMA_CACHE", str(home / "cache"))
    cached = gguf((home / "cache" if moved else home / ".cache" / "llama.cpp") / "ggml-org_tiny-GGUF_tiny-Q8_0.gguf")
    (cached.parent / "manifest=ggml-org=tiny-GGUF=latest.json").write_text("{}")
    own = gguf(home / "models" / "own.gguf")
    shutil.copytree(GOLDEN / "llama", home / "models" / "folder")
    assert names() == [("ggml-org_tiny-GGUF_tiny-Q8_0", "llama.cpp"), ("folder", "~/models"), ("own", "~/models")]
    assert resolve("own").path == own
    assert {model.name for model in local_models() if model.kind == "foreign"} == {name for name, _ in names()}


def test_two_models_of_one_ending_are_not_guessed(home: Path) -> None:
    root = home / ".lmstudio" / "models"
    first = gguf(root / "a" / "Tiny-GGUF" / "x.gguf")
    assert find_foreign("tiny-gguf") is not None
    gguf(root / "b" / "Tiny-GGUF" / "x.gguf")
    assert find_foreign("tiny-gguf") is None
    assert resolve("a/Tiny-GGUF").path == first


def test_what_is_here_comes_before_a_download(home: Path) -> None:
    """`qwen3:8b` is a name of the catalogue too."""
    blob = ollama(home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/8b")
    assert resolve("qwen3:8b").path == blob
