"""Folder of everything that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$MLXINFER_HOME`, or `mlxinfer` in the user's cache directory. Not created."""
    if home := os.environ.get("MLXINFER_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mlxinfer"
