"""The models on this machine: those of installed packages, converted ones, and those in the hub's cache."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..errors import MLXInferError, ModelNotFoundError
from ..loading.aliases import ALIASES, Alias
from ..loading.paths import models_dir


@dataclass(frozen=True, slots=True)
class Entry:
    """`source` is "package", "converted" or "hub"; `path` and `nbytes` are None where the model is known but not here."""

    name: str
    source: str
    path: Path | None
    nbytes: int | None


def entries() -> list[Entry]:
    """Aliases first, installed or not."""
    return [_of_alias(name, alias) for name, alias in ALIASES.items()] + _converted() + _cached()


def _of_alias(name: str, alias: Alias) -> Entry:
    files = alias.installed()
    if len(files) < len(alias.parts):
        return Entry(name, "package", None, None)
    return Entry(name, "package", files[0], sum(file.stat().st_size for file in files))


def _converted() -> list[Entry]:
    folder = models_dir()
    found = sorted(path.parent for path in folder.glob("*/config.json")) if folder.is_dir() else []
    return [Entry(path.name, "converted", path, _directory_bytes(path)) for path in found]


def _cached() -> list[Entry]:
    from ..loading.hub import cached_models

    return [Entry(repo.repo, "hub", repo.path, repo.nbytes) for repo in cached_models()]


def _directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def local_path(model: str) -> Path:
    """Where a model is, without downloading it. Raises `ModelNotFoundError`."""
    from ..loading.resolve import resolve

    known = next((entry for entry in entries() if entry.name == model and entry.path), None)
    if known is None and not Path(model).expanduser().exists():
        raise ModelNotFoundError(f"{model!r} is not on this machine: mlxinfer models pull {model}")
    return known.path if known and known.path and known.source != "package" else resolve(model).path


def remove(name: str) -> int:
    """Delete a converted or a cached model; returns the bytes freed. Raises `MLXInferError` for any other."""
    entry = next((entry for entry in entries() if entry.name == name and entry.path), None)
    if entry is None:
        if Path(name).expanduser().exists():
            raise MLXInferError(f"{name} is a path, and only models that mlxinfer keeps are removed: delete it yourself")
        raise ModelNotFoundError(f"there is no model {name!r} here")
    if entry.source == "package":
        raise MLXInferError(f"{name} comes from a package: pip uninstall {ALIASES[name].distribution}")
    if entry.source == "hub":
        from ..loading.hub import cached_models, delete_cached

        return sum(delete_cached(repo) for repo in cached_models() if repo.repo == name)
    assert entry.path is not None
    shutil.rmtree(entry.path)
    return entry.nbytes or 0
