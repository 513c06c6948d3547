"""A Hugging Face config of the old style, rebuilt from a GGUF file."""

from __future__ import annotations

from ...errors import CheckpointError, UnsupportedModelError
from .archs import BUILDERS
from .hyper import Hyper, shown
from .source import Config, Source
from .split import GGUFFiles


def rebuild_config(files: GGUFFiles) -> Config:
    """The config. Raises `UnsupportedModelError` naming an unknown architecture or hyperparameter, `CheckpointError` for senseless ones."""
    name = architecture(files)
    source = Source(Hyper(files.metadata, name, files.path), files)
    config = BUILDERS[name](source)
    source.hyper.finish()
    return config


def architecture(files: GGUFFiles) -> str:
    """`general.architecture`, one that is supported. Raises `UnsupportedModelError` for another, and for files that are no model."""
    kind = files.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(f"{files.path}: holds a {shown(kind)}, not a model; give the file of the language model")
    version = files.metadata.get("general.quantization_version", 2)
    if not isinstance(version, int) or version != 2:
        raise UnsupportedModelError(f"{files.path}: quantization version {shown(version)} is not supported, only 2; convert it again")
    name = files.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{files.path}: general.architecture is missing from the metadata; convert the model again")
    if name not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise UnsupportedModelError(f"{files.path}: the architecture {shown(name)} is not supported from GGUF (only {known})")
    return name
