"""Where models that this program makes are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$MLXINFER_HOME`, else `mlxinfer` in the user's cache directory. Not created."""
    if home := os.environ.get("MLXINFER_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mlxinfer"


def models_dir() -> Path:
    """Converted models found here can be named without their path."""
    return cache_dir() / "models"


def prefix_dir() -> Path:
    """Where cached keys and values are kept on disk."""
    return cache_dir() / "prefix"
