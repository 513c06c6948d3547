"""From what a user types to a model on this machine. Imports nothing heavy, so that completion may use it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelNotFoundError
from .aliases import ALIASES
from .paths import models_dir

__all__ = ["ALIASES", "Resolved", "resolve"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model directory or a GGUF file, and the name to show for it."""

    path: Path
    name: str


def resolve(what: str | Path) -> Resolved:
    """A directory or GGUF file; an alias; a model converted into the models directory; else a hub id (`org/name`,
    `org/name@revision`, `org/name/file.gguf`), downloaded if need be. Raises `ModelNotFoundError`, `HubError`, `CheckpointError`."""
    text = os.fspath(what)
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):
        return Resolved(_model_in(path), path.resolve().stem if path.is_file() else path.resolve().name)
    if text in ALIASES:
        alias = ALIASES[text]
        return Resolved(alias.find() or _from_hub(alias.hub_id), text)
    if isinstance(what, Path) or _looks_like_a_path(text):
        raise ModelNotFoundError(f"no such file or directory: {text}")
    converted = models_dir() / text
    if text and os.path.isdir(converted):
        return Resolved(converted, text)
    return Resolved(_from_hub(text), text)


def _model_in(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf" and not _is_gguf(path):
            raise ModelNotFoundError(f"{path} is no model: give a directory with config.json and safetensors, or a GGUF file")
        return path
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise ModelNotFoundError(f"{path} holds {len(ggufs)} GGUF files: give one of them, for example {ggufs[0]}")
    return path


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from None


def _looks_like_a_path(text: str) -> bool:
    return (
        text.startswith((".", "~", os.sep)) or text.endswith((os.sep, ".safetensors")) or (text.endswith(".gguf") and text.count("/") < 2)
    )


def _from_hub(text: str) -> Path:
    # Imported here because it takes as long as everything else together, and local models do not need it.
    from .hub import HubId, download

    hub_id = HubId.parse(text)
    if hub_id is None:
        raise ModelNotFoundError(f"{text!r} is no path here, no alias ({', '.join(ALIASES)}) and no hub id (org/name)")
    return download(hub_id)
