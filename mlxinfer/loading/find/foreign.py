"""Models that other programs keep on this machine: LM Studio, Ollama, llama.cpp, and `~/models`. They are read, never changed.

Imports nothing heavy, for shell completion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...util.dataclass import dataclass

OLLAMA = "Ollama"
_REGISTRY = "registry.ollama.ai"
_FIRST_PART = "-00001-of-"


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A model in another program's folder."""

    name: str
    """The owner's name of it, or its place below the owner's folder."""
    owner: str
    """Name of the program, or the folder."""
    path: Path
    """A directory, a GGUF file, or a manifest of Ollama."""


def foreign_models() -> Iterator[ForeignModel]:
    """Yield the models in the folders of other programs that exist."""
    for folder in _lm_studio():
        yield from _in_lm_studio(folder)
    for folder in _ollama():
        yield from _in_ollama(folder / "manifests")
    for folder in _llama_cpp():
        yield from _in_folder(folder, "llama.cpp")
    yield from _in_folder(Path.home() / "models", "~/models")


def find_foreign(text: str) -> ForeignModel | None:
    """Return the model with this name, or the only one whose name ends in `/text`; letters may have any case."""
    wanted = text.lower().removesuffix(":latest")
    if not wanted:
        return None
    ending: dict[Path, ForeignModel] = {}
    for model in foreign_models():
        name = model.name.lower()
        if wanted == name:
            return model
        if name.endswith((f"/{wanted}", f"/{wanted}.gguf")):
            ending[model.path] = model
    return next(iter(ending.values())) if len(ending) == 1 else None


def _existing(*folders: Path | None) -> Iterator[Path]:
    yield from dict.fromkeys(folder for folder in folders if folder and folder.is_dir())


def _lm_studio() -> Iterator[Path]:
    home = Path.home()
    moved = None
    with suppress(OSError, UnicodeDecodeError):
        moved = Path((home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()) / "models"
    return _existing(moved, home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models")


def _ollama() -> Iterator[Path]:
    chosen = os.environ.get("OLLAMA_MODELS", "").strip()
    return _existing(Path(chosen) if chosen else None, Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))


def _llama_cpp() -> Iterator[Path]:
    chosen = os.environ.get("LLAMA_CACHE", "").strip()
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    caches = usual if sys.platform == "darwin" else Path(os.environ.get("XDG_CACHE_HOME") or usual)
    return _existing(Path(chosen) if chosen else None, caches / "llama.cpp")


def _in_lm_studio(folder: Path) -> Iterator[ForeignModel]:
    for model in sorted(each for publisher in _children(folder) for each in _children(publisher)):
        yield from _at(model, f"{model.parent.name}/{model.name}", "LM Studio")


def _in_folder(folder: Path, owner: str) -> Iterator[ForeignModel]:
    for path in _children(folder):
        if path.is_dir():
            yield from _at(path, path.name, owner)
        elif is_model_file(path):
            yield ForeignModel(path.stem, owner, path)


def _at(path: Path, name: str, owner: str) -> Iterator[ForeignModel]:
    """Yield the models in a directory: a checkpoint, or its GGUF files."""
    if (path / "config.json").is_file():
        yield ForeignModel(name, owner, path)
        return
    files = [file for file in _children(path) if is_model_file(file)]
    for file in files:
        yield ForeignModel(name if len(files) == 1 else f"{name}/{file.name}", owner, file)


def is_model_file(path: Path) -> bool:
    """True for a GGUF file that is not a vision tower, and not a later part of another file."""
    name = path.name.lower()
    return name.endswith(".gguf") and "mmproj" not in name and ("-of-" not in name or _FIRST_PART in name) and path.is_file()


def _in_ollama(manifests: Path) -> Iterator[ForeignModel]:
    """Yield `model:tag`, `user/model:tag` and `host/user/model:tag`, as Ollama names them."""
    for host in _children(manifests):
        for model in sorted(each for user in _children(host) for each in _children(user)):
            parts = [model.name] if model.parent.name == "library" else [model.parent.name, model.name]
            name = "/".join(parts if host.name == _REGISTRY else [host.name, *parts])
            for tag in _children(model):
                yield ForeignModel(name if tag.name == "latest" else f"{name}:{tag.name}", OLLAMA, tag)


def _children(folder: Path) -> list[Path]:
    """Paths in a folder, sorted, without hidden ones; none if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
