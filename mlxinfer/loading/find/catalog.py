"""Lists, describes and removes the models on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ...errors import MLXInferError, ModelNotFoundError, WeightsError
from ...models import build, supports
from ...models.config_reader import check_ignored, ignored_note
from ..checkpoint import Checkpoint
from ..gguf.files import part_paths
from ..load import load_tokenizer, model_type, open_checkpoint
from ..memory.plan import usable_memory
from ..summary import Summary, summarize
from ..vision import PreparedVision, prepare_vision, unseen, vision_bytes
from ..weights import MetaWeights
from .converted import converted_folders, find_converted
from .foreign import foreign_models
from .hub import cached_models, delete_cached
from .known import find_known
from .resolve import ALIASES, models_dir, resolve

_WEIGHTS_SHARE = 0.85
"""Share of the memory that the weights of a model may take if nobody named it."""
Kind = Literal["alias", "hub", "converted", "foreign"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded without a download."""

    name: str
    """Name that `load` accepts."""
    kind: Kind
    path: Path
    nbytes: int
    modified: float = 0.0
    """Time of the last change, in seconds since 1970."""
    owner: str = ""
    """The program or folder of a foreign model, such as "Ollama"; "" for others."""


def local_models() -> list[LocalModel]:
    """List aliases whose packages are installed, models in the hub's cache, converted ones, and those of other programs."""
    found = []
    for name, alias in ALIASES.items():
        files = alias.installed()
        if len(files) == len(alias.parts):
            found.append(_local(name, "alias", files[0].parent, files))
    found += [_local(repo.repo, "hub", repo.path, nbytes=repo.nbytes) for repo in cached_models()]
    for folder in dict.fromkeys([*(config.parent for config in sorted(models_dir().glob("*/config.json"))), *converted_folders()]):
        found.append(_local(_converted_name(folder), "converted", folder, _files(folder)))
    return [*found, *_foreign({model.path.resolve() for model in found})]


def _local(name: str, kind: Kind, path: Path, files: Sequence[Path] = (), *, nbytes: int | None = None, owner: str = "") -> LocalModel:
    with suppress(OSError):
        sizes = [file.stat() for file in files or [path]]
        total = sum(size.st_size for size in sizes) if nbytes is None else nbytes
        return LocalModel(name, kind, path, total, max((size.st_mtime for size in sizes), default=0.0), owner)
    return LocalModel(name, kind, path, nbytes or 0, 0.0, owner)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def _converted_name(folder: Path) -> str:
    """The folder's name if `resolve` finds this folder by it, else its path."""
    if folder.parent == models_dir() or (find_converted(folder.name) == folder and not (models_dir() / folder.name).is_dir()):
        return folder.name
    return str(folder)


def _foreign(listed: set[Path]) -> Iterator[LocalModel]:
    """Yield other programs' models that can be opened and are not `listed` yet."""
    for model in foreign_models():
        try:
            path = resolve(model.path).path
        except MLXInferError:
            continue  # another kind of model, or incomplete
        if path.resolve() not in listed:
            listed.add(path.resolve())
            files = _files(path) if path.is_dir() else part_paths(path)
            yield _local(model.name, "foreign", path, files, owner=model.owner)


def find_local(name: str) -> LocalModel | None:
    """Return the model of `local_models` with this name, also by its name in the catalogue."""
    known = find_known(name)
    names = (name, known.hub_id) if known else (name,)
    return next((model for model in local_models() if model.name in names), None)


def usual_model() -> tuple[LocalModel | None, int]:
    """Return the largest model here that leaves memory for its cache and has a chat template, and the number of further ones listed."""
    found, most = local_models(), usable_memory() * _WEIGHTS_SHARE
    fitting = sorted((model for model in found if model.nbytes <= most), key=lambda model: -model.nbytes)
    chosen = next(filter(_chats, fitting), None)
    return chosen, len(found) - 1


def _chats(model: LocalModel) -> bool:
    try:
        with closing(open_checkpoint(resolve(model.name if model.kind == "alias" else model.path).path)) as checkpoint:
            return load_tokenizer(checkpoint).chat_template is not None
    except MLXInferError:
        return False


def remove_model(name: str) -> int:
    """Delete a model of `local_models` and return the freed bytes. Files of pip packages and of other programs stay.

    Raises `MLXInferError`.
    """
    check_removable(name)
    if name in ALIASES:
        return _remove_assembled(name)
    model = find_local(name)
    if model is None:
        raise ModelNotFoundError(f"{name!r} is not on this machine: see mlxinfer models list")
    if model.kind == "converted":
        _delete_directory(model.path)
        return model.nbytes
    try:
        return delete_cached(next(repo for repo in cached_models() if repo.repo == model.name))
    except OSError as error:
        raise MLXInferError(f"cannot delete {model.path}: {error.strerror or error}") from None


def _delete_directory(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise MLXInferError(f"cannot delete {path}: {error.strerror or error}") from None


def check_removable(name: str) -> None:
    """Raise `MLXInferError` for an alias whose files belong to a package, and for a model of another program."""
    file = ALIASES[name].assembled_path() if name in ALIASES else None
    if name in ALIASES and (file is None or not file.exists()):
        raise MLXInferError(f"{name} belongs to a Python package: pip uninstall {ALIASES[name].distribution}")
    model = find_local(name)
    if model is not None and model.kind == "foreign":
        raise MLXInferError(f"{name} belongs to {model.owner}: remove it there ({model.path})")


def _remove_assembled(name: str) -> int:
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
