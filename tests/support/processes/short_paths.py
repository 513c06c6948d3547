"""Directories with short names: a socket's path has at most 103 bytes, and a Mac's directory for temporary files alone takes 80 of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_directory() -> Iterator[Path]:
    """An empty directory that only this user can enter; at the end it is gone."""
    with tempfile.TemporaryDirectory(prefix="mlx", dir="/tmp") as name:
        yield Path(name).resolve()
