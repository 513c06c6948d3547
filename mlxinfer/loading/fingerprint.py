"""What tells one model from another across runs, for what is kept of it on disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import mlx.core as mx

from .. import kernels_cpu
from .._version import __version__
from ..errors import ModelNotFoundError
from .gguf.files import part_paths

_SUFFIXES = (".safetensors", ".json", ".gguf")


def fingerprint(path: Path, *settings: object) -> str:
    """Of the model at a resolved path, loaded with these settings, as hexadecimal digits. It is another one after any of its files was
    replaced or changed, and with another version of what computes: keys and values are not the same to the bit then."""
    try:
        files = [_file(part) for part in _parts(path)]
    except (OSError, ModelNotFoundError):
        # Removed while it runs: nothing that is kept now is to be found again.
        files = [[os.urandom(16).hex()]]
    kernels = kernels_cpu.isa_name() if kernels_cpu.in_use() else ""
    computing = [__version__, mx.__version__, str(mx.default_device()), kernels]  # type: ignore[attr-defined]
    known = json.dumps([files, computing, [str(s) for s in settings]])
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def _parts(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES)
    return list(part_paths(path))


def _file(path: Path) -> list[str | int]:
    """Changes when the file does: the last number even where it is overwritten and given its old time back."""
    found = path.stat()
    return [os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns]
