"""Identifies a model across runs, for caches on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from ... import kernels_cpu
from ..._version import __version__
from ...errors import ModelNotFoundError
from ...util.cache_dir import cache_dir
from ...util.plain_file import file_stamp
from ..files import add_bytes
from ..gguf.files import part_paths

_SUFFIXES = (".safetensors", ".json", ".gguf")
_SHA256 = re.compile("[0-9a-f]{64}")


def fingerprint(path: Path, *settings: object) -> str:
    """32 hexadecimal digits for the model at a resolved path, loaded with these settings.

    They change with the model's files, and with the versions of what computes: keys and values then differ in their last bits.
    """
    try:
        files = [file_stamp(part) for part in model_files(path)]
    except (OSError, ModelNotFoundError):
        # Removed while it runs: a later process must not find its cache.
        files = [[os.urandom(16).hex()]]
    return _settings_digest(files, settings)


def content_fingerprint(path: Path, *settings: object) -> str:
    """A fingerprint that is equal for all copies of the model: it depends on the bytes of the files, not on paths and times."""
    try:
        return _settings_digest([[part.name, content_digest(part)] for part in model_files(path)], settings)
    except (OSError, ModelNotFoundError):
        return os.urandom(16).hex()


def content_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal. It is remembered until the file changes. Raises OSError."""
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):  # the hub's cache names large files by their digest
        return real.name
    stamp = json.dumps(file_stamp(path))
    known = cache_dir() / "digests" / hashlib.blake2b(stamp.encode(), digest_size=16).hexdigest()
    with suppress(OSError, UnicodeDecodeError):
        if _SHA256.fullmatch(found := known.read_text(encoding="ascii")):
            return found
    digest = hashlib.sha256()
    add_bytes(digest, path)
    with suppress(OSError):
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(digest.hexdigest(), encoding="ascii")
    return digest.hexdigest()


def _settings_digest(files: list[list[str | int]] | list[list[str]], settings: tuple[object, ...]) -> str:
    kernels = kernels_cpu.isa_name() if kernels_cpu.in_use() else ""
    computing = [__version__, mx.__version__, str(mx.default_device()), kernels]  # type: ignore[attr-defined]
    known = json.dumps([files, computing, [str(s) for s in settings]])
    return hashlib.blake2b(known.encode(), digest_size=16).hexdigest()


def model_files(path: Path) -> list[Path]:
    """The weights and JSON files of the model at a resolved path. Raises `ModelNotFoundError` for missing parts of a GGUF file."""
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES)
    return list(part_paths(path))
