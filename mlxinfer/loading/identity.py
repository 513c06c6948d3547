"""Which weights these are, told without reading them."""

from __future__ import annotations

import hashlib
from pathlib import Path


def identity(path: Path) -> str:
    """A digest of a checkpoint's place and of the names, sizes and times of its files: another one after any of them was changed."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16)
    for file in files:
        known = file.stat()
        digest.update(f"\0{file.name}\0{known.st_size}\0{known.st_mtime_ns}".encode())
    return digest.hexdigest()
