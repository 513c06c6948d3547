"""Lists, describes and removes the models on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ...errors import MLXInferError, ModelNotFoundError, WeightsError
from ...models import build, supports
from ...models.config_reader import check_ignored, ignored_note
from ..checkpoint import Checkpoint
from ..load import model_type, open_checkpoint
from ..summary import Summary, summarize
from ..vision import PreparedVision, prepare_vision, unseen, vision_bytes
from ..weights import MetaWeights
from .hub import cached_models, delete_cached
from .resolve import ALIASES, models_dir, resolve

Kind = Literal["alias", "hub", "converted"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded without a download."""

    name: str
    """Name that `load` accepts."""
    kind: Kind
    path: Path
    nbytes: int


def local_models() -> list[LocalModel]:
    """List aliases whose packages are installed, models in the hub's cache, and models in the models directory."""
    found = []
    for name, alias in ALIASES.items():
        files = alias.installed()
        if len(files) == len(alias.parts):
            found.append(LocalModel(name, "alias", files[0].parent, sum(file.stat().st_size for file in files)))
    found += [LocalModel(repo.repo, "hub", repo.path, repo.nbytes) for repo in cached_models()]
    for config in sorted(models_dir().glob("*/config.json")):
        directory = config.parent
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        found.append(LocalModel(directory.name, "converted", directory, size))
    return found


def remove_model(name: str) -> int:
    """Delete a model of `local_models` and return the freed bytes. Files of pip packages stay. Raises `MLXInferError`."""
    if name in ALIASES:
        return _remove_assembled(name)
    for repo in cached_models():
        if repo.repo == name:
            return delete_cached(repo)
    for model in local_models():
        if model.kind == "converted" and model.name == name:
            _delete_directory(model.path)
            return model.nbytes
    raise ModelNotFoundError(f"there is no model {name!r} to remove: see mlxinfer models list")


def _delete_directory(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise MLXInferError(f"cannot delete {path}: {error.strerror or error}") from None


def check_removable(name: str) -> None:
    """Raise `MLXInferError` for an alias whose files belong to a package."""
    file = ALIASES[name].assembled_path() if name in ALIASES else None
    if name in ALIASES and (file is None or not file.exists()):
        raise MLXInferError(f"{name} belongs to a Python package: pip uninstall {ALIASES[name].distribution}")


def _remove_assembled(name: str) -> int:
    check_removable(name)
    file = ALIASES[name].assembled_path()
    assert file is not None
    size = file.stat().st_size
    file.unlink()
    return size


def _vision_of(checkpoint: Checkpoint, weights: MetaWeights) -> PreparedVision | str:
    """Return the vision tower, or why the model cannot see. Loading reports faults of the text model itself."""
    with suppress(WeightsError):
        weights.finish()
    vision = prepare_vision(checkpoint, weights.index, mx.bfloat16)
    if not isinstance(vision, str):
        vision.close()
    return vision


def describe(what: str | Path, *, ignore_config_keys: Sequence[str] = ()) -> Summary:
    """Summarize the headers of a model. A hub id is downloaded if it is not cached. Raises `MLXInferError`."""
    found = resolve(what)
    checkpoint = open_checkpoint(found.path, ignore_config_keys=ignore_config_keys)
    try:
        check_ignored(ignore_config_keys, checkpoint.config)
        weights = MetaWeights(checkpoint)
        graph = build(checkpoint.config, weights) if supports(model_type(checkpoint)) else None
        notes = graph.notes if graph else tuple(ignored_note(checkpoint.config))
        summary = summarize(checkpoint, found.name, model_type(checkpoint), graph.max_context if graph else None)
        vision = _vision_of(checkpoint, weights) if graph else unseen("its text model runs on mlx-lm's graph")
        return replace(summary, notes=notes, tower_bytes=vision_bytes(vision), blind=vision if isinstance(vision, str) else "")
    finally:
        checkpoint.close()
