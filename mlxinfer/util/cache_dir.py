"""Places of this user's files: the folder of everything that can be made again, and the server's socket."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$MLXINFER_HOME`, or `mlxinfer` in the user's cache directory. Not created."""
    if home := os.environ.get("MLXINFER_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mlxinfer"


def default_socket() -> Path:
    """Return the Unix socket of this user's server: `$MLXINFER_SOCKET`, or else `~/.mlxinfer/api.sock`."""
    return Path(os.environ.get("MLXINFER_SOCKET") or "~/.mlxinfer/api.sock").expanduser()
