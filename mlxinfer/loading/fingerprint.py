"""Identifies a model across runs, for caches on disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import mlx.core as mx

from .. import kernels_cpu
from .._version import __version__
from ..errors import ModelNotFoundError
from .files import file_stamp
from .gguf.files import part_paths

_SUFFIXES = (".safetensors", ".json", ".gguf")


def fingerprint(path: Path, *settings: object) -> str:
    """32 hexadecimal digits for the model at a resolved path, loaded with these settings.

    They change when a file of the model does, and with the version of what computes: keys and values then differ in their last bits.
    """
    try:
        files = [file_stamp(part) for part in model_files(path)]
    except (OSError, ModelNotFoundError):
        # Removed while it runs: what is cached now must not be found again.
        files = [[os.urandom(16).hex()]]
    kernels = kernels_cpu.isa_name() if kernels_cpu.in_use() else ""
    computing = [__version__, mx.__version__, str(mx.default_device()), kernels]  # type: ignore[attr-defined]
    known = json.dumps([files, computing, [str(s) for s in settings]])
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def model_files(path: Path) -> list[Path]:
    """The weights and JSON files of the model at a resolved path. Raises `ModelNotFoundError` for parts of a GGUF file that are missing."""
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES)
    return list(part_paths(path))
